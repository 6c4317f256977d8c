-- Hand the groups of `lease_id` back untrained, and drop those of `unreadable`: no draw could read
-- them. The bytes of the last one stay aside, to be looked at.
if call('HEXISTS', key.lease, arg.lease_id) == 1 then
  return_lease(arg.lease_id, arg.counts)
  for _, id in ipairs(arg.unreadable) do
    local packed = call('HGET', key.groups, id)
    if packed then
      local payload = call('GET', PAYLOAD .. id)
      if payload then
        call('DEL', key.unreadable)
        call('HSET', key.unreadable, id, payload)
      end
      drop_group(id, read_record(packed), 'unreadable')
    end
  end
  save()
end
return 'ok'
