-- Fill slots with the payloads that the commands before this script have set, to expire by
-- themselves unless they are taken here. Arguments are lists of one number or text a group; oldest
-- and newest are versions among its tokens. Returns one word for each.
local ids, outcomes, members = arg.ids, {}, {}
for i, id in ipairs(ids) do members[i] = slot_member(id, arg.versions[i]) end
local expiries = read_parts(members, 'ZMSCORE', key.slots)
local ceilings = S.has_ceilings and read_parts(ids, 'HMGET', key.ceilings) or {}

-- Ids of an hour or two: a set for each hour, which expires as a whole.
local hour = math.floor(now / REMEMBERED_MS)
local added = key.added .. ':' .. hour
local function was_added(id)
  return call('SISMEMBER', added, id) == 1
    or call('SISMEMBER', key.added .. ':' .. hour - 1, id) == 1
end

local function without_slot(id)
  if call('HEXISTS', key.groups, id) == 1 then return 'added' end
  call('UNLINK', PAYLOAD .. id)
  return was_added(id) and 'added' or 'expired'
end

local given, taken, records, places, remembered = {}, {}, {}, {}, {}
local function fill(i, expiry)
  local id, newest = ids[i], arg.newest[i]
  local payload = PAYLOAD .. id
  -- Only a payload that was just set has a time to live to lose.
  if call('PERSIST', payload) == 0 then return 'no-payload' end
  local size = arg.sizes[i]
  S.play_ms = S.play_ms + now - since(expiry)
  remembered[#remembered + 1] = id
  if ceilings[i] and newest > tonumber(ceilings[i]) then
    call('UNLINK', payload)
    free_slot(id, arg.versions[i])
    count_dropped('lost-version', {[SHAPE] = arg.shapes[i]})
    return 'dropped'
  end
  count(S.playing, arg.versions[i], -1)
  S.sequence = S.sequence + 1
  S.num_bytes = S.num_bytes + size
  S.largest = math.max(S.largest, size)
  -- What is dropped for its age is dropped for its real one; a schedule goes by the admission.
  local version = c.policy == 'drop' and arg.oldest[i] or arg.versions[i]
  count(S.ready, version, 1)
  local n = #given + 1
  given[n], taken[n] = id, members[i]
  records[2 * n - 1] = id
  records[2 * n] = struct.pack(
    RECORD, version, newest, S.sequence, 0, 0, size, arg.priorities[i]) .. arg.shapes[i]
  -- As a whole number: Redis would write it out with the care that a fraction needs.
  places[2 * n - 1] = string.format('%d', version * ARRIVALS + S.sequence)
  places[2 * n] = id
  if picks or evicts then rank(id, read_record(records[2 * n])) end
  return 'added'
end

local is_done = {}
for i, id in ipairs(ids) do
  if is_done[id] then
    outcomes[i] = outcomes[is_done[id]]
  else
    is_done[id] = i
    outcomes[i] = expiries[i] and fill(i, tonumber(expiries[i])) or without_slot(id)
  end
end

if #remembered > 0 then
  in_parts(remembered, 'SADD', added)
  if S.added_hour ~= hour then
    call('PEXPIRE', added, 2 * REMEMBERED_MS)
    S.added_hour = hour
  end
end
if #given > 0 then
  in_parts(taken, 'ZREM', key.slots)
  if S.has_ceilings then forget_ceilings(given) end
  in_parts(records, 'HSET', key.groups)
  in_parts(places, 'ZADD', key.ready)
  S.num_slots = S.num_slots - #given
  S.inserts = S.inserts + #given
  S.num_added = S.num_added + #given
  S.num_stored = S.num_stored + #given
  -- A draw that wants more than there is need not be woken.
  if num_ready() >= c.groups_per_step then wake_data() end
  -- A slot counted as large as the largest group, and under drop could not be evicted.
  if c.policy == 'drop' or c.max_bytes then wake_room() end
end
save()
return outcomes
