-- Stop or resume granting slots.
redis.call('HSET', key.state, 'paused', arg.paused and '1' or '0')
wake(key.room)
return 'ok'
