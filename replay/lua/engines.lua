-- Forget the dead engines and return the living: [record, version, record, version, ...].
if redis.replicate_commands then redis.replicate_commands() end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.engine_expiry, '-inf', now)) do
  redis.call('ZREM', key.engine_expiry, id)
  redis.call('HDEL', key.engine_version, id)
  redis.call('HDEL', key.engines, id)
  redis.call('XADD', key.room, 'MAXLEN', '~', 16, '*', 'at', now)
end
local reply = {}
for _, id in ipairs(redis.call('ZRANGE', key.engine_expiry, 0, -1)) do
  reply[#reply + 1] = redis.call('HGET', key.engines, id)
  reply[#reply + 1] = redis.call('HGET', key.engine_version, id)
end
return reply
