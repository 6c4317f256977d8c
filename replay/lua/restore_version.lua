-- The learner resumed at `version`: every lease comes back, and what newer versions sampled goes.
for _, lease_id in ipairs(redis.call('ZRANGE', key.leases, 0, -1)) do return_lease(lease_id) end
redis.call('HSET', key.state, 'learner_version', arg.version, 'ramp_version', arg.version)
local num_dropped = 0
for _, id in ipairs(redis.call('ZRANGE', key.order, 0, -1)) do
  if tonumber(redis.call('HGET', key.newest_of, id)) > arg.version then
    drop_ready(id, 'lost-version')
    num_dropped = num_dropped + 1
  end
end
for _, id in ipairs(redis.call('ZRANGE', key.slots, 0, -1)) do
  if tonumber(redis.call('HGET', key.version_of, id)) > arg.version then
    free_slot(id)
    count_dropped('lost-version')
    num_dropped = num_dropped + 1
  else
    -- Still being played, perhaps by an engine that holds a lost version: add.lua looks at it.
    redis.call('HSET', key.ceiling, id, arg.version)
  end
end
wake(key.room)
wake(key.data)
return num_dropped
