-- The groups of `lease_id` were trained and made `version`.
if is_held(key.acknowledged, arg.lease_id) then return 'ok' end
if not is_held(key.leases, arg.lease_id) then return 'expired' end
local ids = groups_of(arg.lease_id)
for _, id in ipairs(ids) do forget_group(id, key.count_leased) end
end_lease(arg.lease_id)
redis.call('ZADD', key.acknowledged, now, arg.lease_id)
redis.call('HSET', key.state, 'learner_version', math.max(learner_version(), arg.version))
bump('num_trained', #ids)
wake(key.room)
wake(key.data)
return 'ok'
