-- Give slot `id` back unfilled, counted under `reason`.
local slot = slot_of(arg.id)
if slot then
  S.play_ms = S.play_ms + now - slot.since
  free_slot(arg.id, slot)
  count_dropped(arg.reason)
  save()
end
return 'ok'
