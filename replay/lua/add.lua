-- Fill slot `id` with the payload in ARGV[2]; `newest` is the newest version among its tokens.
if is_held(key.added, arg.id) then return 'added' end
if not is_held(key.slots, arg.id) then return 'expired' end

redis.call('ZADD', key.added, now, arg.id)
local ceiling = tonumber(redis.call('HGET', key.ceiling, arg.id) or math.huge)
if arg.newest > ceiling then
  free_slot(arg.id)
  count_dropped('lost-version')
  return 'dropped'
end

local version = tonumber(redis.call('HGET', key.version_of, arg.id))
local place = version * ARRIVALS + bump('sequence', 1)
redis.call('ZREM', key.slots, arg.id)
redis.call('HDEL', key.ceiling, arg.id)
redis.call('HSET', key.payloads, arg.id, ARGV[2])
redis.call('HSET', key.newest_of, arg.id, arg.newest)
redis.call('ZADD', key.order, place, arg.id)
redis.call('ZADD', key.ready, place, arg.id)
count(key.count_playing, version, -1)
count(key.count_ready, version, 1)
bump('num_bytes', #ARGV[2])
bump('num_added', 1)
wake(key.data)
return 'added'
