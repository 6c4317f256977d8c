-- What scripts of the buffer share. Each carries only what it names, which scripts.py finds out: a
-- definition begins in the first column and ends there or on the same line.

-- Fields of a stored group's record: seven numbers and a text, turns and tokens of each trajectory,
-- '2x310 4x782'. Numbers of a known order are read by `struct`, at a fifth of what msgpack takes.
local VERSION, NEWEST, ARRIVAL, DRAWS, RETURNS, SIZE, PRIORITY, SHAPE = 1, 2, 3, 4, 5, 6, 7, 8
local RECORD = '>ddddddd'

local function packed_record(group)
  return struct.pack(RECORD, unpack(group, 1, 7)) .. group[SHAPE]
end

local function read_record(packed)
  local group = {struct.unpack(RECORD, packed)}
  group[SHAPE] = string.sub(packed, 57)
  return group
end

-- Whoever is refused waits for a signal after the last one.
local function wake_room()
  S.room_signal = call('XADD', key.room, 'MAXLEN', '~', 16, '*', 'at', now)
end

local function wake_data()
  S.data_signal = call('XADD', key.data, 'MAXLEN', '~', 16, '*', 'at', now)
end

-- A command over many values: Lua hands over less than 8000 at a time.
local function in_parts(values, command, name)
  for i = 1, #values, 1000 do
    local last = math.min(#values, i + 999)
    if name then
      call(command, name, unpack(values, i, last))
    else
      call(command, unpack(values, i, last))
    end
  end
end

local function read_parts(values, command, name)
  local replies = {}
  for i = 1, #values, 1000 do
    local part = call(command, name, unpack(values, i, math.min(#values, i + 999)))
    for n, reply in ipairs(part) do replies[i + n - 1] = reply end
  end
  return replies
end

local function count(counts, version, by)
  local n = (counts[version] or 0) + by
  counts[version] = n ~= 0 and n or nil
end

local function counts(...)
  local total = {}
  for _, by_version in ipairs({...}) do
    for version, n in pairs(by_version) do total[version] = (total[version] or 0) + n end
  end
  return total
end

-- As pairs in one list: an empty table would travel as an array.
local function flat(by_version)
  local list = {}
  for version, n in pairs(by_version) do
    list[#list + 1] = version
    list[#list + 1] = n
  end
  return list
end

-- The version the next draw is for: leases in hand are the steps before it.
local function next_version() return S.learner_version + S.num_leases end

-- Most groups that the version window and max_groups let exist.
local reach = math.min((c.max_staleness + 1) * c.groups_per_step, c.max_groups)

local function num_held_back()
  return c.is_adaptive == 1 and reach - most_outstanding(S.admitted, c.groups_per_step, reach) or 0
end

local function expire_at(at)
  if not S.next_expiry or at < S.next_expiry then S.next_expiry = at end
end

-- ---- indexes of the groups that are free to be drawn
--
-- ready: never trained, by (version, arrival).  again: trained, and to be trained once more.
-- pick: both, by draw_by.  evict: those that may be evicted, by evict_by: both under drop, else those
-- that were trained. The last two stand only where their order is another.

local picks = c.draw_by ~= 'fifo' or c.max_draws > 1
local evicts = (c.policy == 'drop' or c.max_draws > 1) and c.evict_by ~= 'fifo'

local function rank(id, group)
  local turn = group[DRAWS] + group[RETURNS]
  local version, arrival, priority = group[VERSION], group[ARRIVAL], group[PRIORITY]
  if picks then
    call('ZADD', key.pick, draw_score(
      c.draw_by, version, arrival, priority, S.virtual, c.seed, turn), id)
  end
  if evicts and (c.policy == 'drop' or group[DRAWS] > 0) then
    call('ZADD', key.evict, evict_score(
      c.evict_by, version, arrival, priority, S.evicted_at, c.seed, turn), id)
  end
end

local function put(id, group)
  local place = group[VERSION] * ARRIVALS + group[ARRIVAL]
  call('ZADD', group[DRAWS] == 0 and key.ready or key.again, place, id)
  rank(id, group)
end

local function take(ids)
  in_parts(ids, 'ZREM', key.ready)
  if c.max_draws > 1 then in_parts(ids, 'ZREM', key.again) end
  if picks then in_parts(ids, 'ZREM', key.pick) end
  if evicts then in_parts(ids, 'ZREM', key.evict) end
end

local function record(id) return read_record(call('HGET', key.groups, id)) end

local function write(id, group) call('HSET', key.groups, id, packed_record(group)) end

-- Groups that stand in `again`: where a group is trained once only, none does.
local function num_again() return c.max_draws > 1 and call('ZCARD', key.again) or 0 end

local function num_ready()
  local total = num_again()
  for _, n in pairs(S.ready) do total = total + n end
  return total
end

-- ---- slots, groups and leases

local function count_dropped(reason, group)
  call('HINCRBY', key.dropped, reason, 1)
  if not group then return end
  for turns, tokens in string.gmatch(group[SHAPE], '(%d+)x(%d+)') do
    local bucket = 1
    while bucket < tonumber(tokens) do bucket = bucket * 2 end
    call('HINCRBY', key.dropped_turns, reason .. ' ' .. turns, 1)
    call('HINCRBY', key.dropped_tokens, reason .. ' ' .. bucket, 1)
  end
end

-- A slot is one member of a sorted set, by the ms at which it expires: 'id version'.
local function slot_member(id, version) return id .. ' ' .. version end

local function slot_of(member)
  local id, version = string.match(member, '^(.+) (%d+)$')
  return id, tonumber(version)
end

-- By today's slot_timeout; another one, from before a restart, must not put it into the future.
local function since(expiry) return math.min(now, expiry - c.slot_timeout_ms) end

-- Slots that were held when the learner resumed, and the newest version their groups may hold.
local function forget_ceilings(ids)
  in_parts(ids, 'HDEL', key.ceilings)
  S.has_ceilings = call('EXISTS', key.ceilings) == 1
end

local function free_slot(id, version)
  call('ZREM', key.slots, slot_member(id, version))
  if S.has_ceilings then forget_ceilings({id}) end
  S.num_slots = S.num_slots - 1
  count(S.playing, version, -1)
  wake_room()
  wake_data()
end

local PAYLOAD = key.payload .. ':'

-- Groups that stand in no index any more, `num_bytes` in all.
local function forget(ids, num_bytes)
  if #ids == 0 then return end
  local payloads = {}
  for i, id in ipairs(ids) do payloads[i] = PAYLOAD .. id end
  S.num_bytes = S.num_bytes - num_bytes
  S.num_stored = S.num_stored - #ids
  in_parts(ids, 'HDEL', key.groups)
  in_parts(payloads, 'UNLINK')
end

-- Drops for which nobody is to blame but the buffer's own policy; what they lose counts as inserted.
local POLICY = {evicted = true, overdue = c.policy == 'drop'}

local function drop_group(id, group, reason)
  take({id})
  forget({id}, group[SIZE])
  if group[DRAWS] > 0 then return end  -- it was trained, so nothing is lost
  count(S.ready, group[VERSION], -1)
  count_dropped(reason, group)
  if not POLICY[reason] then S.inserts = S.inserts - 1 end
  -- What takes its place is younger: under exact the ramp begins anew.
  if reason ~= 'lost-version' then S.ramp_version = next_version() end
  wake_room()
end

-- `counts`: whether coming back counts against max_returns.
local function return_lease(lease_id, counts)
  local lease = cmsgpack.unpack(call('HGET', key.lease, lease_id))
  call('ZREM', key.leases, lease_id)
  call('HDEL', key.lease, lease_id)
  S.num_leases = S.num_leases - 1
  S.samples = S.samples - #lease.ids
  S.train_ms = S.train_ms + now - lease.since
  for _, id in ipairs(lease.ids) do
    local group = record(id)
    if counts then group[RETURNS] = group[RETURNS] + 1 end
    if group[DRAWS] == 0 then
      count(S.leased, group[VERSION], -1)
      count(S.ready, group[VERSION], 1)
    end
    if group[DRAWS] > 0 and group[DRAWS] >= c.max_draws then
      forget({id}, group[SIZE])  -- trained often enough for the limits of today
    elseif group[RETURNS] > c.max_returns then
      drop_group(id, group, 'returned')
    else
      write(id, group)
      put(id, group)
    end
  end
  wake_data()
  wake_room()
end

local function trim(zset) call('ZREMRANGEBYSCORE', zset, '-inf', now - REMEMBERED_MS) end

local function expires_in_ms() return S.next_expiry and S.next_expiry - now or nil end

local function limiter()
  return {
    samples_per_insert = c.samples_per_insert, min_size = c.min_size, min_diff = c.min_diff,
    max_diff = c.max_diff}
end

-- Groups that no step may train any more.
local function drop_overdue()
  local first = next_version() - c.max_staleness
  local is_overdue = c.max_draws > 1
  for version in pairs(S.ready) do is_overdue = is_overdue or version < first end
  if not is_overdue then return end
  local bound = string.format('(%.0f', first * ARRIVALS)
  for _, zset in ipairs({key.ready, key.again}) do
    for _, id in ipairs(call('ZRANGEBYSCORE', zset, '-inf', bound)) do
      drop_group(id, record(id), 'overdue')
    end
  end
end

-- ---- who waits: one record for the callers of a process on one side, and the sum of their waits

local function report(callers, num, reason)
  call('HSET', key.waited, callers.name, callers.total_ms)
  if num == 0 then return call('HDEL', key.waits, callers.name) end
  local before = call('HGET', key.waits, callers.name)
  reason = reason or (before and cmsgpack.unpack(before).reason)
  if not reason then return end
  call('HSET', key.waits, callers.name, cmsgpack.pack({
    side = callers.side, reason = reason, num = num, since = now - callers.age_ms, seen = now}))
end

-- A try of some of them was refused, or granted.
local function refuse(reason)
  if arg.callers then report(arg.callers, arg.callers.num + arg.callers.asking, reason) end
end

local function grant()
  if arg.callers and arg.callers.has_waited then report(arg.callers, arg.callers.num) end
end
