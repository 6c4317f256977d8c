-- A consistent snapshot.
local waits = {}
local flat_waits = call('HGETALL', key.waits)
for i = 2, #flat_waits, 2 do
  local wait = cmsgpack.unpack(flat_waits[i])
  -- A caller that died waiting does not end its wait; living ones ask again every few seconds.
  if now - wait.seen > 15000 then
    call('HDEL', key.waits, flat_waits[i - 1])
  else
    waits[#waits + 1] = {wait.side, wait.reason, (now - wait.since) / 1000, wait.num}
  end
end
local playing = {}
local slots = call('ZRANGE', key.slots, 0, 63, 'WITHSCORES')
for i = 1, #slots, 2 do
  local id, version = slot_of(slots[i])
  local expiry = tonumber(slots[i + 1])
  playing[#playing + 1] = {id, version, (now - since(expiry)) / 1000, (expiry - now) / 1000}
end
local training = {}
local leases = call('ZRANGE', key.leases, 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local lease = cmsgpack.unpack(call('HGET', key.lease, leases[i]))
  local left = tonumber(leases[i + 1]) - now
  training[#training + 1] = {
    leases[i], lease.version, (now - lease.since) / 1000, left / 1000, #lease.ids}
end
local waited = {rollout = 0, learner = 0}
local flat_waited = call('HGETALL', key.waited)
for i = 1, #flat_waited, 2 do
  local side = string.match(flat_waited[i], '^%a+')
  waited[side] = waited[side] + tonumber(flat_waited[i + 1])
end
return cmsgpack.pack({
  state = {
    learner_version = S.learner_version,
    paused = S.paused,
    num_slots = S.num_slots,
    num_ready = num_ready(),
    num_stored = S.num_stored,
    num_held_back = num_held_back(),
    num_bytes = S.num_bytes,
    num_admitted = S.num_admitted,
    num_added = S.num_added,
    num_drawn = S.num_drawn,
    num_trained = S.num_trained,
    num_slots_expired = S.num_slots_expired,
    num_leases_expired = S.num_leases_expired,
    outstanding = flat(counts(S.playing, S.ready, S.leased)),
    wait_room_ms = waited.rollout,
    wait_data_ms = waited.learner,
    play_ms = S.play_ms,
    train_ms = S.train_ms,
  },
  dropped = call('HGETALL', key.dropped),
  dropped_turns = call('HGETALL', key.dropped_turns),
  dropped_tokens = call('HGETALL', key.dropped_tokens),
  waits = waits,
  playing = playing,
  training = training,
})
