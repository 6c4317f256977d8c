-- Lease the groups of earliest deadline as `lease_id`, else say what is missing.
local function leased(lease_id)
  local ids = groups_of(lease_id)
  local head = {
    version = tonumber(redis.call('HGET', key.lease_version, lease_id)),
    ramp_version = tonumber(redis.call('HGET', key.state, 'ramp_version') or 0),
    ids = ids,
  }
  local reply = {cmsgpack.pack(head)}
  for i, id in ipairs(ids) do reply[i + 1] = redis.call('HGET', key.payloads, id) end
  return reply
end

-- The same call, sent again because its reply was lost.
if is_held(key.leases, arg.lease_id) then return leased(arg.lease_id) end

local version = next_version()

local function unfit_reason(id)
  if tonumber(redis.call('HGET', key.draws_of, id) or 0) >= arg.max_draws then return 'max-draws' end
  local admitted = tonumber(redis.call('HGET', key.version_of, id))
  if admitted + arg.max_staleness < version then return 'overdue' end
  if arg.staleness_policy == 'exact'
    and tonumber(redis.call('HGET', key.newest_of, id)) ~= admitted then
    return 'mixed-versions'
  end
end

-- Dropping lets others move up, so the candidates are read until all of them fit. What takes the
-- place of a dropped group is younger: under exact the ramp begins anew.
local candidates
repeat
  local num_dropped = 0
  candidates = redis.call('ZRANGE', key.ready, 0, arg.groups_per_step - 1)
  for _, id in ipairs(candidates) do
    local reason = unfit_reason(id)
    if reason then
      drop_ready(id, reason)
      redis.call('HSET', key.state, 'ramp_version', version)
      num_dropped = num_dropped + 1
    end
  end
until num_dropped == 0

local playing = counts(key.count_playing)
local missing, blocking_until = drawable(
  counts(key.count_ready), playing, version, arg.max_staleness, arg.groups_per_step,
  arg.staleness_policy)
if missing > 0 or blocking_until then
  local awaited = {}
  for _, id in ipairs(redis.call('ZRANGE', key.slots, 0, -1)) do
    local admitted = tonumber(redis.call('HGET', key.version_of, id))
    if #awaited < 4 and admitted <= (blocking_until or math.huge) then awaited[#awaited + 1] = id end
  end
  return {cmsgpack.pack({
    version = version,
    missing = missing,
    blocking_until = blocking_until,
    playing = flat(playing),
    awaited = awaited,
    expires_in_ms = next_expiry_ms(),
  })}
end

redis.call('ZADD', key.leases, now + arg.lease_timeout_ms, arg.lease_id)
redis.call('HSET', key.lease_groups, arg.lease_id, table.concat(candidates, ' '))
redis.call('HSET', key.lease_version, arg.lease_id, version)
for _, id in ipairs(candidates) do
  local admitted = redis.call('HGET', key.version_of, id)
  redis.call('ZREM', key.ready, id)
  redis.call('HINCRBY', key.draws_of, id, 1)
  count(key.count_ready, admitted, -1)
  count(key.count_leased, admitted, 1)
end
bump('num_drawn', #candidates)
return leased(arg.lease_id)
