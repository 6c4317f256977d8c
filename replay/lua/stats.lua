-- A consistent snapshot.
return cmsgpack.pack({
  state = redis.call('HGETALL', key.state),
  dropped = redis.call('HGETALL', key.dropped),
  outstanding = flat(counts(key.count_playing, key.count_ready, key.count_leased)),
  num_slots = redis.call('ZCARD', key.slots),
  num_ready = redis.call('ZCARD', key.ready),
  num_stored = redis.call('ZCARD', key.order),
})
