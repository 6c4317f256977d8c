-- What every script starts with. `key` (name -> Redis key) and `arg` (named arguments) are defined
-- above, by connection.py. Every script calls reclaim() first, so expired slots and leases come back
-- with whichever call happens next.

-- Needed on Redis 6, where a script may not write after TIME otherwise; gone from later servers.
if redis.replicate_commands then redis.replicate_commands() end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

local REMEMBERED_MS = 3600 * 1000  -- how long a repeated add or acknowledge is recognised
local ARRIVALS = 4294967296        -- 2^32; order is by version first, then by arrival

local function bump(name, by) return redis.call('HINCRBY', key.state, name, by) end

local function wake(stream) redis.call('XADD', stream, 'MAXLEN', '~', 16, '*', 'at', now) end

local function count(hash, version, by)
  if redis.call('HINCRBY', hash, version, by) == 0 then redis.call('HDEL', hash, version) end
end

local function counts(...)
  local total = {}
  for _, hash in ipairs({...}) do
    local flat = redis.call('HGETALL', hash)
    for i = 1, #flat, 2 do
      local version = tonumber(flat[i])
      total[version] = (total[version] or 0) + tonumber(flat[i + 1])
    end
  end
  return total
end

-- As pairs in one list: an empty table would travel as an array.
local function flat(by_version)
  local list = {}
  for version, n in pairs(by_version) do
    list[#list + 1] = version
    list[#list + 1] = n
  end
  return list
end

local function learner_version()
  return tonumber(redis.call('HGET', key.state, 'learner_version') or 0)
end

-- The version the next draw is for: leases in hand are the steps before it.
local function next_version() return learner_version() + redis.call('ZCARD', key.leases) end

local function is_held(zset, id) return redis.call('ZSCORE', zset, id) ~= false end

local function count_dropped(reason) redis.call('HINCRBY', key.dropped, reason, 1) end

local function free_slot(id)
  redis.call('ZREM', key.slots, id)
  redis.call('HDEL', key.ceiling, id)
  count(key.count_playing, redis.call('HGET', key.version_of, id), -1)
  redis.call('HDEL', key.version_of, id)
  wake(key.room)
  wake(key.data)
end

local function forget_group(id, counted_in)
  count(counted_in, redis.call('HGET', key.version_of, id), -1)
  bump('num_bytes', -redis.call('HSTRLEN', key.payloads, id))
  redis.call('HDEL', key.payloads, id)
  redis.call('HDEL', key.version_of, id)
  redis.call('HDEL', key.newest_of, id)
  redis.call('HDEL', key.draws_of, id)
  redis.call('ZREM', key.order, id)
  redis.call('ZREM', key.ready, id)
end

local function drop_ready(id, reason)
  forget_group(id, key.count_ready)
  count_dropped(reason)
  wake(key.room)
end

local function groups_of(lease_id)
  local ids = {}
  for id in string.gmatch(redis.call('HGET', key.lease_groups, lease_id), '%S+') do
    ids[#ids + 1] = id
  end
  return ids
end

local function end_lease(lease_id)
  redis.call('ZREM', key.leases, lease_id)
  redis.call('HDEL', key.lease_groups, lease_id)
  redis.call('HDEL', key.lease_version, lease_id)
end

local function return_lease(lease_id)
  for _, id in ipairs(groups_of(lease_id)) do
    local version = redis.call('HGET', key.version_of, id)
    redis.call('ZADD', key.ready, redis.call('ZSCORE', key.order, id), id)
    count(key.count_leased, version, -1)
    count(key.count_ready, version, 1)
  end
  end_lease(lease_id)
  wake(key.data)
  wake(key.room)
end

local function reclaim()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.slots, '-inf', now)) do
    free_slot(id)
    bump('num_slots_expired', 1)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', now)) do
    return_lease(id)
    bump('num_leases_expired', 1)
  end
  redis.call('ZREMRANGEBYSCORE', key.added, '-inf', now - REMEMBERED_MS)
  redis.call('ZREMRANGEBYSCORE', key.acknowledged, '-inf', now - REMEMBERED_MS)
end

-- Milliseconds to the nearest expiry of a slot or lease; nil when nothing is held.
local function next_expiry_ms()
  local nearest
  for _, zset in ipairs({key.slots, key.leases}) do
    local first = redis.call('ZRANGE', zset, 0, 0, 'WITHSCORES')
    if first[2] then nearest = math.min(nearest or math.huge, tonumber(first[2]) - now) end
  end
  return nearest
end

reclaim()
