-- What became due since the last script, before anything else is done.

-- The configuration may name other selectors than the one before, and fewer draws.
if is_new_config then
  local done, num_bytes = {}, 0
  for _, id in ipairs(call('ZRANGE', key.again, 0, -1)) do
    local group = record(id)
    if group[DRAWS] >= c.max_draws then
      done[#done + 1] = id
      num_bytes = num_bytes + group[SIZE]
    end
  end
  in_parts(done, 'ZREM', key.again)
  forget(done, num_bytes)
  call('DEL', key.pick, key.evict)
  if picks or evicts then
    for _, zset in ipairs({key.ready, key.again}) do
      for _, id in ipairs(call('ZRANGE', zset, 0, -1)) do rank(id, record(id)) end
    end
  end
end

-- What another limiter let in and out would hold this one back for ever: under `queue` a step needs as
-- many inserts as it has samples, and the window may not allow what is lacking. It begins with
-- what is here.
if is_new_limiter then
  local untrained, num_leased = 0, 0
  for _, n in pairs(S.ready) do untrained = untrained + n end
  for _, lease_id in ipairs(call('ZRANGE', key.leases, 0, -1)) do
    num_leased = num_leased + #cmsgpack.unpack(call('HGET', key.lease, lease_id)).ids
  end
  S.inserts, S.samples = untrained + num_leased, num_leased
end

-- Expired slots and leases.
if S.next_expiry and now >= S.next_expiry then
  for _, member in ipairs(call('ZRANGEBYSCORE', key.slots, '-inf', now)) do
    free_slot(slot_of(member))
    S.num_slots_expired = S.num_slots_expired + 1
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', key.leases, '-inf', now)) do
    return_lease(id, true)
    S.num_leases_expired = S.num_leases_expired + 1
  end
  S.next_expiry = false
  for _, zset in ipairs({key.slots, key.leases}) do
    local first = call('ZRANGE', zset, 0, 0, 'WITHSCORES')
    if first[2] then expire_at(tonumber(first[2])) end
  end
end
save()
