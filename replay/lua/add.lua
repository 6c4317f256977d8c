-- Fill slots with the payloads that the commands before this script have set, to expire by
-- themselves unless they are taken here. Arguments are lists of one number or text a group; oldest
-- and newest are versions among its tokens. Returns one word for each.
local ids, outcomes = arg.ids, {}
local packed_slots = read_parts(ids, 'HMGET', key.slot)

local function without_slot(id)
  if call('HEXISTS', key.groups, id) == 1 then return 'added' end
  call('UNLINK', key['payload:'] .. id)
  return call('ZSCORE', key.added, id) and 'added' or 'expired'
end

local filled, remembered = {}, {}
local now_text = string.format('%d', now)  -- numbers are made text anew in every call
local function fill(i, slot)
  local id, newest = ids[i], arg.newest[i]
  local payload = key['payload:'] .. id
  -- Only a payload that was just set has a time to live to lose.
  if call('PERSIST', payload) == 0 then return 'no-payload' end
  local size = arg.sizes[i]
  S.play_ms = S.play_ms + now - slot.since
  remembered[#remembered + 1] = now_text
  remembered[#remembered + 1] = id
  if slot.ceiling and newest > slot.ceiling then
    call('UNLINK', payload)
    free_slot(id, slot)
    count_dropped('lost-version')
    return 'dropped'
  end
  count(S.playing, slot.version, -1)
  S.num_slots = S.num_slots - 1
  S.sequence = S.sequence + 1
  S.num_bytes = S.num_bytes + size
  S.largest = math.max(S.largest, size)
  -- What is dropped for its age is dropped for its real one; a schedule goes by the admission.
  local version = c.policy == 'drop' and arg.oldest[i] or slot.version
  local group = {
    version, newest, S.sequence, 0, 0, size, arg.priorities[i], arg.shapes[i]}
  count(S.ready, version, 1)
  filled[#filled + 1] = {id, group}
  return 'added'
end

local is_done = {}
for i, id in ipairs(ids) do
  if is_done[id] then
    outcomes[i] = outcomes[is_done[id]]
  else
    is_done[id] = i
    local packed = packed_slots[i]
    outcomes[i] = packed and fill(i, cmsgpack.unpack(packed)) or without_slot(id)
  end
end

if #remembered > 0 then
  in_parts(remembered, 'ZADD', key.added)
  if S.sequence % 64 < #ids then trim(key.added) end
end
if #filled > 0 then
  local taken, records, places = {}, {}, {}
  for i, pair in ipairs(filled) do
    local id, group = pair[1], pair[2]
    taken[i] = id
    records[2 * i - 1], records[2 * i] = id, cmsgpack.pack(group)
    places[2 * i - 1], places[2 * i] = group[VERSION] * ARRIVALS + group[ARRIVAL], id
    if picks or evicts then rank(id, group) end
  end
  in_parts(taken, 'ZREM', key.slots)
  in_parts(taken, 'HDEL', key.slot)
  in_parts(records, 'HSET', key.groups)
  in_parts(places, 'ZADD', key.ready)
  S.inserts = S.inserts + #filled
  S.num_added = S.num_added + #filled
  S.num_stored = S.num_stored + #filled
  -- A draw that wants more than there is need not be woken.
  if num_ready() >= c.groups_per_step then wake('data') end
  -- A slot counted as large as the largest group, and under drop could not be evicted.
  if c.policy == 'drop' or c.max_bytes then wake('room') end
end
save()
return outcomes
