-- Let `id` lead the run for `ttl_ms`, unless another does; who leads it now.
if redis.replicate_commands then redis.replicate_commands() end
local leader = redis.call('GET', key.leader)
if leader and leader ~= arg.id then return leader end
redis.call('SET', key.leader, arg.id, 'PX', arg.ttl_ms)
return arg.id
