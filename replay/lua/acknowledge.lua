-- The groups of `lease_id` were trained and made `version`.
local packed_lease = call('HGET', key.lease, arg.lease_id)
if not packed_lease then
  return call('ZSCORE', key.acknowledged, arg.lease_id) and 'ok' or 'expired'
end
local lease = cmsgpack.unpack(packed_lease)
local drawn_next = next_version()
S.outstanding = S.num_slots
for _, n in pairs(S.ready) do S.outstanding = S.outstanding + n end
call('ZREM', key.leases, arg.lease_id)
call('HDEL', key.lease, arg.lease_id)
call('ZADD', key.acknowledged, now, arg.lease_id)
trim(key.acknowledged)
S.num_leases = S.num_leases - 1
S.learner_version = math.max(S.learner_version, arg.version)
S.num_trained = S.num_trained + #lease.ids
S.train_ms = S.train_ms + now - lease.since

local done, num_bytes, oldest = {}, 0, next_version() - c.max_staleness
-- The usual step is the one that the next draw counted on: nothing can be drawn that could not before.
local is_news = next_version() ~= drawn_next
for i, packed in ipairs(read_parts(lease.ids, 'HMGET', key.groups)) do
  -- Most go now, so a record is not written out as a table first.
  local version, _, _, draws, _, size = struct.unpack(RECORD, packed)
  if draws == 0 then count(S.leased, version, -1) end
  if draws + 1 < c.max_draws and version >= oldest then
    local group = read_record(packed)
    group[DRAWS] = draws + 1
    write(lease.ids[i], group)
    put(lease.ids[i], group)
    is_news = true
  else
    done[#done + 1] = lease.ids[i]
    num_bytes = num_bytes + size
  end
end
forget(done, num_bytes)
wake_room()
if is_news then wake_data() end
save()
return 'ok'
