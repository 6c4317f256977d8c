-- Register engine `id` for `ttl_ms`. While it lives, the version it registered only moves up.
if redis.replicate_commands then redis.replicate_commands() end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local expiry = tonumber(redis.call('ZSCORE', key.engine_expiry, arg.id) or 0)
local held = tonumber(redis.call('HGET', key.engine_version, arg.id) or -1)
if expiry <= now then held = -1 end
if arg.version > held then
  redis.call('XADD', key.room, 'MAXLEN', '~', 16, '*', 'at', now)
end
redis.call('ZADD', key.engine_expiry, now + arg.ttl_ms, arg.id)
redis.call('HSET', key.engine_version, arg.id, math.max(held, arg.version))
redis.call('HSET', key.engines, arg.id, arg.record)
return 'ok'
