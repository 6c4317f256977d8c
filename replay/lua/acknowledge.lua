-- The groups of `lease_id` were trained and made `version`.
local packed_lease = call('HGET', key.lease, arg.lease_id)
if not packed_lease then
  return call('ZSCORE', key.acknowledged, arg.lease_id) and 'ok' or 'expired'
end
local lease = cmsgpack.unpack(packed_lease)
call('ZREM', key.leases, arg.lease_id)
call('HDEL', key.lease, arg.lease_id)
call('ZADD', key.acknowledged, now, arg.lease_id)
trim(key.acknowledged)
S.num_leases = S.num_leases - 1
S.learner_version = math.max(S.learner_version, arg.version)
S.num_trained = S.num_trained + #lease.ids
S.train_ms = S.train_ms + now - lease.since

local done, records = {}, {}
for i, packed in ipairs(read_parts(lease.ids, 'HMGET', key.groups)) do
  local id, group = lease.ids[i], read_record(packed)
  if group[DRAWS] == 0 then count(S.leased, group[VERSION], -1) end
  group[DRAWS] = group[DRAWS] + 1
  if group[DRAWS] < c.max_draws and group[VERSION] + c.max_staleness >= next_version() then
    write(id, group)
    put(id, group)
  else
    done[#done + 1] = id
    records[id] = group
  end
end
forget(done, records)
wake_room()
wake_data()
save()
return 'ok'
