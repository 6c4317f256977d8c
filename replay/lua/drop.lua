-- Give slot `id` back unfilled, counted under `reason`.
if is_held(key.slots, arg.id) then
  free_slot(arg.id)
  count_dropped(arg.reason)
end
return 'ok'
