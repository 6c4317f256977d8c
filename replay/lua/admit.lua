-- Grant up to #slot_ids slots at `version`, else say which bound holds them back.
local granted, members = {}, {}
for i, id in ipairs(arg.slot_ids) do members[i] = slot_member(id, arg.version) end
-- The same call, sent again because its reply was lost. What is granted begins with the first.
if call('ZSCORE', key.slots, members[1]) then
  for i, expiry in ipairs(read_parts(members, 'ZMSCORE', key.slots)) do
    if expiry then granted[#granted + 1] = arg.slot_ids[i] end
  end
  return cmsgpack.pack({granted = granted})
end

if c.policy == 'drop' then drop_overdue() end
local outstanding = counts(S.playing, S.ready)
local num_groups = S.num_slots + S.num_stored
local window = admissible(
  outstanding, arg.version, next_version(), c.max_staleness, c.groups_per_step, c.policy)
local ahead = math.huge
if c.is_adaptive == 1 then
  ahead = reach - num_held_back()
  for _, of_version in pairs(outstanding) do ahead = ahead - of_version end
end

-- Room in groups and in bytes. Groups that were trained owe nothing, so they can make more; under
-- drop all can that are free to be drawn.
local evictable = c.policy == 'drop' and num_ready() or num_again()
local function room_for_bytes(num_bytes)
  if not c.max_bytes then return math.huge end
  local left = c.max_bytes - num_bytes
  return S.largest > 0 and math.floor(left / S.largest) - S.num_slots or (left > 0 and math.huge or 0)
end
local capacity = c.max_groups - num_groups + evictable
local bytes = room_for_bytes(S.num_bytes)
if evictable > 0 and bytes <= 0 then
  -- Whether they would make room for one, counted as far as that takes: there may be many.
  local wanted = S.num_bytes + (S.num_slots + 1) * S.largest - c.max_bytes
  for _, zset in ipairs(c.policy == 'drop' and {key.ready, key.again} or {key.again}) do
    local first = 0
    repeat
      local ids = wanted > 0 and call('ZRANGE', zset, first, first + 63) or {}
      for _, packed in ipairs(#ids > 0 and call('HMGET', key.groups, unpack(ids)) or {}) do
        wanted = wanted - read_record(packed)[SIZE]
      end
      first = first + 64
    until #ids < 64
  end
  bytes = wanted > 0 and 0 or 1
end
local limit = limiter_room(limiter(), num_groups, S.inserts + S.num_slots, S.samples)

local reason
if S.paused then
  reason = 'paused'
elseif is_engine_behind(arg.version, S.learner_version, c.max_staleness, c.policy) then
  reason = 'engine-behind'
elseif capacity <= 0 then
  reason = 'capacity'
elseif bytes <= 0 then
  reason = 'bytes'
elseif window <= 0 then
  reason = 'window'
elseif ahead <= 0 then
  reason = 'lookahead'
elseif limit <= 0 then
  reason = 'limiter'
end

local function evict_one()
  local first
  if evicts then
    first = call('ZRANGE', key.evict, 0, 0, 'WITHSCORES')
    S.evicted_at = math.max(S.evicted_at, tonumber(first[2]))
  elseif c.policy ~= 'drop' then
    first = call('ZRANGE', key.again, 0, 0)
  else
    first = call('ZRANGE', key.ready, 0, 0, 'WITHSCORES')
    local again = call('ZRANGE', key.again, 0, 0, 'WITHSCORES')
    if not first[1] or (again[1] and tonumber(again[2]) < tonumber(first[2])) then first = again end
  end
  drop_group(first[1], record(first[1]), 'evicted')
end

local n = math.min(#arg.slot_ids, window, ahead, capacity, bytes, limit)
if not reason and evictable > 0 then
  -- Room is made for one group at a time: n is what fits without, but one at least.
  n = math.max(1, math.min(n, c.max_groups - num_groups, room_for_bytes(S.num_bytes)))
  local free = evictable
  while free > 0
    and (S.num_slots + S.num_stored + n > c.max_groups or room_for_bytes(S.num_bytes) < n) do
    evict_one()
    free = free - 1
  end
end

if reason then
  refuse(reason)
  save()
  return cmsgpack.pack({
    reason = reason,
    learner_version = S.learner_version,
    next_version = next_version(),
    num_groups = num_groups,
    num_bytes = S.num_bytes,
    num_held_back = num_held_back(),
    largest = S.largest,
    num_slots = S.num_slots,
    inserts = S.inserts,
    samples = S.samples,
    outstanding = flat(outstanding),
    expires_in_ms = expires_in_ms(),
    signal = S.room_signal,
  })
end

local expiry = now + c.slot_timeout_ms
local expiry_text, scores = string.format('%d', expiry), {}
for i = 1, n do
  granted[i] = arg.slot_ids[i]
  scores[2 * i - 1], scores[2 * i] = expiry_text, members[i]
end
in_parts(scores, 'ZADD', key.slots)
expire_at(expiry)
count(S.playing, arg.version, n)
S.num_slots = S.num_slots + n
S.num_admitted = S.num_admitted + n
grant()
save()
return cmsgpack.pack({granted = granted})
