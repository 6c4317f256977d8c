-- Grant up to #slot_ids slots at `version`, else say which bound holds them back.
local granted = {}
for _, id in ipairs(arg.slot_ids) do
  if is_held(key.slots, id) then granted[#granted + 1] = id end
end
-- The same call, sent again because its reply was lost.
if #granted > 0 then return cmsgpack.pack({granted = granted}) end

local learner = learner_version()
local outstanding = counts(key.count_playing, key.count_ready)
local num_groups = redis.call('ZCARD', key.slots) + redis.call('ZCARD', key.order)
local window = admissible(
  outstanding, arg.version, next_version(), arg.max_staleness, arg.groups_per_step,
  arg.staleness_policy)

local reason
if redis.call('HGET', key.state, 'paused') == '1' then
  reason = 'paused'
elseif is_engine_behind(arg.version, learner, arg.max_staleness, arg.staleness_policy) then
  reason = 'engine-behind'
elseif num_groups >= arg.max_groups then
  reason = 'capacity'
elseif window == 0 then
  reason = 'window'
end
if reason then
  return cmsgpack.pack({
    reason = reason,
    learner_version = learner,
    next_version = next_version(),
    num_groups = num_groups,
    outstanding = flat(outstanding),
    expires_in_ms = next_expiry_ms(),
  })
end

local n = math.min(#arg.slot_ids, window, arg.max_groups - num_groups)
for i = 1, n do
  local id = arg.slot_ids[i]
  redis.call('ZADD', key.slots, now + arg.slot_timeout_ms, id)
  redis.call('HSET', key.version_of, id, arg.version)
  granted[i] = id
end
count(key.count_playing, arg.version, n)
bump('num_admitted', n)
return cmsgpack.pack({granted = granted})
