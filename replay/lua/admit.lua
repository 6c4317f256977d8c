-- Grant up to #slot_ids slots at `version`, else say which bound holds them back.
local granted = {}
for i, packed in ipairs(read_parts(arg.slot_ids, 'HMGET', key.slot)) do
  if packed then granted[#granted + 1] = arg.slot_ids[i] end
end
-- The same call, sent again because its reply was lost.
if #granted > 0 then return cmsgpack.pack({granted = granted}) end

if c.policy == 'drop' then drop_overdue() end
local outstanding = counts(S.playing, S.ready)
local num_groups = S.num_slots + S.num_stored
local window = admissible(
  outstanding, arg.version, next_version(), c.max_staleness, c.groups_per_step, c.policy)

-- Room in groups and in bytes. Groups that were trained owe nothing, so they can make more; under
-- drop all can that are free to be drawn.
local evictable = c.policy == 'drop' and num_ready() or call('ZCARD', key.again)
local function room_for_bytes(num_bytes)
  if not c.max_bytes then return math.huge end
  local left = c.max_bytes - num_bytes
  return S.largest > 0 and math.floor(left / S.largest) - S.num_slots or (left > 0 and math.huge or 0)
end
local capacity = c.max_groups - num_groups + evictable
local bytes = room_for_bytes(S.num_bytes)
if evictable > 0 and bytes < #arg.slot_ids then
  local kept = S.leased_bytes
  if c.policy ~= 'drop' then
    kept = S.num_bytes
    for _, id in ipairs(call('ZRANGE', key.again, 0, -1)) do kept = kept - record(id)[SIZE] end
  end
  bytes = room_for_bytes(kept)
end
local limit = limiter_room(c.limiter, num_groups, S.inserts + S.num_slots, S.samples)

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
elseif limit <= 0 then
  reason = 'limiter'
end

local function evict_one()
  local first
  if c.policy ~= 'drop' then
    first = call('ZRANGE', key.again, 0, 0)
  elseif evicts then
    first = call('ZRANGE', key.evict, 0, 0, 'WITHSCORES')
    S.evicted_at = math.max(S.evicted_at, tonumber(first[2]))
  else
    first = call('ZRANGE', key.ready, 0, 0, 'WITHSCORES')
    local again = call('ZRANGE', key.again, 0, 0, 'WITHSCORES')
    if not first[1] or (again[1] and tonumber(again[2]) < tonumber(first[2])) then first = again end
  end
  drop_group(first[1], record(first[1]), 'evicted')
end

local n = math.min(#arg.slot_ids, window, capacity, bytes, limit)
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
local slot = cmsgpack.pack({version = arg.version, since = now})
local scores, records = {}, {}
for i = 1, n do
  local id = arg.slot_ids[i]
  granted[i] = id
  scores[2 * i - 1], scores[2 * i] = expiry, id
  records[2 * i - 1], records[2 * i] = id, slot
end
in_parts(scores, 'ZADD', key.slots)
in_parts(records, 'HSET', key.slot)
expire_at(expiry)
count(S.playing, arg.version, n)
S.num_slots = S.num_slots + n
S.num_admitted = S.num_admitted + n
grant()
save()
return cmsgpack.pack({granted = granted})
