-- Give slot `id`, admitted at `version`, back unfilled, counted under `reason`.
local expiry = call('ZSCORE', key.slots, slot_member(arg.id, arg.version))
if expiry then
  S.play_ms = S.play_ms + now - since(tonumber(expiry))
  free_slot(arg.id, arg.version)
  count_dropped(arg.reason)
  save()
end
return 'ok'
