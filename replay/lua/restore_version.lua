-- The learner resumed at `version`: every lease comes back, and what newer versions sampled goes.
for _, lease_id in ipairs(call('ZRANGE', key.leases, 0, -1)) do return_lease(lease_id, true) end
S.learner_version, S.ramp_version = arg.version, arg.version
local num_dropped = 0
for _, zset in ipairs({key.ready, key.again}) do
  for _, id in ipairs(call('ZRANGE', zset, 0, -1)) do
    local group = record(id)
    if group[NEWEST] > arg.version then
      drop_group(id, group, 'lost-version')
      num_dropped = num_dropped + 1
    end
  end
end
for _, member in ipairs(call('ZRANGE', key.slots, 0, -1)) do
  local id, version = slot_of(member)
  if version > arg.version then
    free_slot(id, version)
    count_dropped('lost-version')
    num_dropped = num_dropped + 1
  else
    -- Still being played, perhaps by an engine that holds a lost version: add.lua looks at it.
    local ceiling = tonumber(call('HGET', key.ceilings, id)) or arg.version
    call('HSET', key.ceilings, id, math.min(ceiling, arg.version))
    S.has_ceilings = true
  end
end
S.is_tried, S.outstanding = 0, -1  -- what a learner of before found is of no use
wake_room()
wake_data()
save()
return num_dropped
