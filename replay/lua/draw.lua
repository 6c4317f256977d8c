-- Lease one step's groups as `lease_id`, else say what is missing.
local function leased(lease)
  return cmsgpack.pack({version = lease.version, ramp_version = S.ramp_version, ids = lease.ids})
end

-- The same call, sent again because its reply was lost.
local held = call('HGET', key.lease, arg.lease_id)
if held then return leased(cmsgpack.unpack(held)) end

local step = c.groups_per_step
drop_overdue()
if c.policy == 'exact' then
  -- Buffered under another policy. Dropping lets others move up, so look until all of them fit.
  repeat
    local num_dropped = 0
    for _, id in ipairs(call('ZRANGE', key.ready, 0, step - 1)) do
      local group = record(id)
      if group[NEWEST] ~= group[VERSION] then
        drop_group(id, group, 'mixed-versions')
        num_dropped = num_dropped + 1
      end
    end
  until num_dropped == 0
end

-- What the first try of a step finds is what there was without waiting. What is lacked may be
-- admitted at once, and a little more for each while that a step's draw goes on waiting.
if c.is_adaptive == 1 then
  local left, is_first = num_ready() - step, S.is_tried == 0
  local is_late = S.outstanding >= 0 and now >= S.added_at + MORE_EVERY_MS
  if is_first then S.is_tried, S.first_left = 1, left end
  if left < 0 and (is_first or is_late) then
    S.admitted, S.num_doublings = short_of(
      S.admitted, S.num_doublings, S.was_cut, is_first and -left or 0, step, reach)
    S.most_needed, S.num_seen, S.was_cut, S.added_at = 0, 0, 0, now
    wake_room()
  end
end

local version = next_version()
local missing, blocking_until, forced = drawable(
  S.ready, S.playing, num_again(), version, c.max_staleness, step, c.policy)
local is_limited = missing == 0 and not blocking_until
  and not may_sample(limiter(), step, S.num_stored, S.inserts, S.samples)
if missing > 0 or blocking_until or is_limited then
  -- A few at a time: the first ones run out first, so those that are waited for stand in front.
  local awaited, first = {}, 0
  repeat
    local members = call('ZRANGE', key.slots, first, first + 15)
    for _, member in ipairs(members) do
      local id, playing_version = slot_of(member)
      if #awaited < 4 and playing_version <= (blocking_until or math.huge) then
        awaited[#awaited + 1] = id
      end
    end
    first = first + 16
  until #awaited == 4 or #members < 16
  if blocking_until and S.is_tried == 1 then S.is_tried = 2 end
  refuse(is_limited and 'limiter' or missing > 0 and 'missing' or 'blocked')
  save()
  return cmsgpack.pack({
    version = version,
    missing = missing,
    blocking_until = blocking_until,
    is_limited = is_limited,
    num_stored = S.num_stored,
    largest = S.largest,
    inserts = S.inserts,
    samples = S.samples,
    playing = flat(S.playing),
    awaited = awaited,
    expires_in_ms = expires_in_ms(),
    signal = S.data_signal,
  })
end

local function lease_ready(of_version, n)
  count(S.ready, of_version, -n)
  count(S.leased, of_version, n)
end

local ids
if not picks then
  -- Places are version * ARRIVALS + arrival, and nothing here was ever trained.
  local popped = call('ZPOPMIN', key.ready, step)
  ids = {}
  local of_version, num_counted = nil, 0
  for i = 1, #popped, 2 do
    local next_one = math.floor(popped[i + 1] / ARRIVALS)
    if next_one ~= of_version then
      if of_version then lease_ready(of_version, #ids - num_counted) end
      of_version, num_counted = next_one, #ids
    end
    ids[#ids + 1] = popped[i]
  end
  lease_ready(of_version, #ids - num_counted)
  if evicts then in_parts(ids, 'ZREM', key.evict) end
else
  -- Those that can wait no longer, then whatever the selector puts first.
  ids = forced > 0 and call('ZRANGE', key.ready, 0, forced - 1) or {}
  local is_chosen = {}
  for _, id in ipairs(ids) do is_chosen[id] = true end
  local ranked = call('ZRANGE', key.pick, 0, step + forced - 1, 'WITHSCORES')
  for i = 1, #ranked, 2 do
    if #ids < step and not is_chosen[ranked[i]] then
      ids[#ids + 1] = ranked[i]
      if c.draw_by == 'uniform' or c.draw_by == 'prioritised' then
        S.virtual = math.max(S.virtual, tonumber(ranked[i + 1]))
      end
    end
  end
  take(ids)
  for _, packed in ipairs(read_parts(ids, 'HMGET', key.groups)) do
    local group = read_record(packed)
    if group[DRAWS] == 0 then lease_ready(group[VERSION], 1) end
  end
end
assert(#ids == step, 'a step of ' .. step .. ' groups came to ' .. #ids)
local lease = {version = version, since = now, ids = ids}
local expiry = now + c.lease_timeout_ms
call('ZADD', key.leases, expiry, arg.lease_id)
call('HSET', key.lease, arg.lease_id, cmsgpack.pack(lease))
expire_at(expiry)
S.num_leases = S.num_leases + 1
S.samples = S.samples + step
S.num_drawn = S.num_drawn + step
-- Once for each step that ended: a draw that is handed back and drawn again tells nothing new.
if c.is_adaptive == 1 and S.first_left >= 0 and S.outstanding >= 0 then
  S.admitted, S.most_needed, S.num_seen, S.was_cut = after_draw(
    S.admitted, S.most_needed, S.num_seen, S.num_doublings, S.was_cut,
    S.first_left, S.outstanding, S.is_tried == 2, step, reach)
end
S.is_tried, S.outstanding = 0, -1
grant()
-- Room by the limiter or the lookahead: who waits for the learner to sample may go on.
if c.max_diff < 1e300 or c.is_adaptive == 1 then wake_room() end
save()
return leased(lease)
