-- What every script of the buffer starts with. `key` (name -> Redis key) and `arg` (named arguments)
-- are defined above, by connection.py; rule.lua and select.lua stand between. The counters of the
-- buffer are one value, `S`, read here and written by save(): a script that changes anything ends
-- with it. Expired slots and leases come back with whichever script runs next.

-- Needed on Redis 6, where a script may not write after TIME otherwise; gone from later servers.
if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call

local LAYOUT = 4                   -- of the keys and of what they hold
local REMEMBERED_MS = 3600 * 1000  -- how long a repeated add or acknowledge is recognised

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

-- The state: its numbers, then what else there is.
local STATE = '>dddddddddddddddddddddddd'
local S = {
  now = 0, ahead = 0, learner_version = 0, ramp_version = 0, sequence = 0, virtual = 0,
  evicted_at = 0, num_bytes = 0, largest = 0, num_slots = 0, num_stored = 0, num_leases = 0,
  inserts = 0, samples = 0, num_admitted = 0, num_added = 0, num_drawn = 0, num_trained = 0,
  num_slots_expired = 0, num_leases_expired = 0, play_ms = 0, train_ms = 0, added_hour = 0,
  room_signal = '0-0', data_signal = '0-0', paused = false, has_ceilings = false,
  playing = {}, ready = {}, leased = {}, next_expiry = nil, config = nil,
}
local packed_state = redis.pcall('GET', key.state)
if packed_state then
  local is_text = type(packed_state) == 'string'
  local is_ours = is_text and #packed_state > 192 and string.byte(packed_state) == 64
  local layout = is_ours and struct.unpack('>d', packed_state)
  if layout ~= LAYOUT then
    local other = is_text and not is_ours and cmsgpack.unpack(packed_state).layout
    return redis.error_reply('LAYOUT ' .. (layout or other or 1) .. ' ' .. LAYOUT)
  end
  local rest
  layout, S.now, S.ahead, S.learner_version, S.ramp_version, S.sequence, S.virtual,
    S.evicted_at, S.num_bytes, S.largest, S.num_slots, S.num_stored, S.num_leases,
    S.inserts, S.samples, S.num_admitted, S.num_added, S.num_drawn, S.num_trained,
    S.num_slots_expired, S.num_leases_expired, S.play_ms, S.train_ms, S.added_hour, rest
    = struct.unpack(STATE, packed_state)
  S.room_signal, S.data_signal, S.paused, S.has_ceilings, S.playing, S.ready, S.leased,
    S.next_expiry, S.config = unpack(cmsgpack.unpack(string.sub(packed_state, rest)), 1, 9)
  S.next_expiry, S.config = S.next_expiry or nil, S.config or nil
end

-- Limits and orders of the caller; who only looks has none, and goes by those of the last who had.
local is_new_config = arg.config and arg.config ~= S.config
if is_new_config then S.config = arg.config end
local c = S.config and cjson.decode(S.config) or {
  policy = 'pace', max_staleness = 0, draw_by = 'fifo', evict_by = 'fifo', max_draws = 1,
  max_returns = 0, slot_timeout_ms = 0}

local function save()
  call('SET', key.state, struct.pack(STATE,
    LAYOUT, S.now, S.ahead, S.learner_version, S.ramp_version, S.sequence, S.virtual,
    S.evicted_at, S.num_bytes, S.largest, S.num_slots, S.num_stored, S.num_leases,
    S.inserts, S.samples, S.num_admitted, S.num_added, S.num_drawn, S.num_trained,
    S.num_slots_expired, S.num_leases_expired, S.play_ms, S.train_ms, S.added_hour)
    .. cmsgpack.pack({
      S.room_signal, S.data_signal, S.paused, S.has_ceilings, S.playing, S.ready, S.leased,
      S.next_expiry or false, S.config or false}))
end

local clock = call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + S.ahead
-- The server's clock may be set back; deadlines must not move away with it.
if now < S.now then
  S.ahead = S.ahead + S.now - now
  now = S.now
  save()
end
S.now = now

-- Whoever is refused waits for a signal after the last one.
local function wake(stream)
  S[stream .. '_signal'] = call('XADD', key[stream], 'MAXLEN', '~', 16, '*', 'at', now)
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

local function expire_at(at)
  if not S.next_expiry or at < S.next_expiry then S.next_expiry = at end
end

-- ---- indexes of the groups that are free to be drawn
--
-- ready: never trained, by (version, arrival).  again: trained, and to be trained once more.
-- pick: both, by draw_by.  evict: both, by evict_by.  The last two stand only where they differ.

local picks = c.draw_by ~= 'fifo' or c.max_draws > 1
local evicts = c.policy == 'drop' and c.evict_by ~= 'fifo'

local function rank(id, group)
  local turn = group[DRAWS] + group[RETURNS]
  local version, arrival, priority = group[VERSION], group[ARRIVAL], group[PRIORITY]
  if picks then
    call('ZADD', key.pick, draw_score(
      c.draw_by, version, arrival, priority, S.virtual, c.seed, turn), id)
  end
  if evicts then
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

local function num_ready() return call('ZCARD', key.ready) + call('ZCARD', key.again) end

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
  wake('room')
  wake('data')
end

local PAYLOAD = key['payload:']

-- `of_records`: id -> record, of groups that stand in no index any more.
local function forget(ids, of_records)
  if #ids == 0 then return end
  local payloads = {}
  for i, id in ipairs(ids) do
    payloads[i] = PAYLOAD .. id
    S.num_bytes = S.num_bytes - of_records[id][SIZE]
  end
  S.num_stored = S.num_stored - #ids
  in_parts(ids, 'HDEL', key.groups)
  in_parts(payloads, 'UNLINK')
end

-- The configuration may name other selectors than the one before, and fewer draws.
if is_new_config then
  local done, records = {}, {}
  for _, id in ipairs(call('ZRANGE', key.again, 0, -1)) do
    records[id] = record(id)
    if records[id][DRAWS] >= c.max_draws then done[#done + 1] = id end
  end
  in_parts(done, 'ZREM', key.again)
  forget(done, records)
  call('DEL', key.pick, key.evict)
  if picks or evicts then
    for _, zset in ipairs({key.ready, key.again}) do
      for _, id in ipairs(call('ZRANGE', zset, 0, -1)) do rank(id, record(id)) end
    end
  end
  save()
end

-- Drops for which nobody is to blame but the buffer's own policy; what they lose counts as inserted.
local POLICY = {evicted = true, overdue = c.policy == 'drop'}

local function drop_group(id, group, reason)
  take({id})
  forget({id}, {[id] = group})
  if group[DRAWS] > 0 then return end  -- it was trained, so nothing is lost
  count(S.ready, group[VERSION], -1)
  count_dropped(reason, group)
  if not POLICY[reason] then S.inserts = S.inserts - 1 end
  -- What takes its place is younger: under exact the ramp begins anew.
  if reason ~= 'lost-version' then S.ramp_version = next_version() end
  wake('room')
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
      forget({id}, {[id] = group})  -- trained often enough for the limits of today
    elseif group[RETURNS] > c.max_returns then
      drop_group(id, group, 'returned')
    else
      write(id, group)
      put(id, group)
    end
  end
  wake('data')
  wake('room')
end

local function reclaim()
  if not S.next_expiry or now < S.next_expiry then return end
  for _, member in ipairs(call('ZRANGEBYSCORE', key.slots, '-inf', now)) do
    free_slot(slot_of(member))
    S.num_slots_expired = S.num_slots_expired + 1
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', key.leases, '-inf', now)) do
    return_lease(id, true)
    S.num_leases_expired = S.num_leases_expired + 1
  end
  S.next_expiry = nil
  for _, zset in ipairs({key.slots, key.leases}) do
    local first = call('ZRANGE', zset, 0, 0, 'WITHSCORES')
    if first[2] then expire_at(tonumber(first[2])) end
  end
  save()
end

local function trim(zset) call('ZREMRANGEBYSCORE', zset, '-inf', now - REMEMBERED_MS) end

local function expires_in_ms() return S.next_expiry and S.next_expiry - now end

-- Groups that no step may train any more.
local function drop_overdue()
  local bound = string.format('(%.0f', (next_version() - c.max_staleness) * ARRIVALS)
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

reclaim()
