-- The arithmetic of schedule.py, limiter.py and, at the end, lookahead.py. Counts are tables of
-- version -> number of groups.

local function due(counts, last_version)
  local total = 0
  for version, n in pairs(counts) do
    if version <= last_version then total = total + n end
  end
  return total
end

local function is_engine_behind(version, learner_version, max_staleness, policy)
  if policy == 'exact' then return version ~= learner_version end
  return version + max_staleness < learner_version
end

local function admissible(
  outstanding, version, learner_version, max_staleness, groups_per_step, policy)
  if is_engine_behind(version, learner_version, max_staleness, policy) then return 0 end
  if policy == 'drop' then return math.huge end
  local function room_until(last)
    return (last + max_staleness - learner_version + 1) * groups_per_step - due(outstanding, last)
  end
  local room = room_until(version)
  for last in pairs(outstanding) do
    if last > version then room = math.min(room, room_until(last)) end
  end
  return math.max(0, room)
end

local function in_time(counts, learner_version, max_staleness)
  local kept = {}
  for version, n in pairs(counts) do
    if version + max_staleness >= learner_version then kept[version] = n end
  end
  return kept
end

-- Returns how many groups are missing, the version up to which groups being played must come first
-- (nil: none), and how many of the earliest deadlines must be in this step.
local function drawable(
  ready, playing, num_again, learner_version, max_staleness, groups_per_step, policy)
  local usable = in_time(ready, learner_version, max_staleness)
  local num_ready = due(usable, math.huge) + num_again
  if policy == 'exact' then
    local newest
    for version in pairs(playing) do newest = math.max(newest or version, version) end
    local window = (max_staleness + 1) * groups_per_step
    return math.max(0, window - num_ready), newest, groups_per_step
  end
  if num_ready < groups_per_step then return groups_per_step - num_ready, nil, 0 end
  if policy == 'drop' then return 0, nil, 0 end
  local awaited = in_time(playing, learner_version, max_staleness)
  local first
  local forced = 0
  for _, counts in ipairs({usable, awaited}) do
    for last in pairs(counts) do
      local due_ready, due_playing = due(usable, last), due(awaited, last)
      local drawn = math.min(groups_per_step, due_ready)
      local later_steps = (last + max_staleness - learner_version) * groups_per_step
      local is_late = due_ready - drawn + due_playing > later_steps
      if is_late and due_playing > 0 and drawn < groups_per_step then
        first = math.min(first or last, last)
      end
      forced = math.max(forced, math.min(drawn, due_ready + due_playing - later_steps))
    end
  end
  return 0, first, forced
end

-- How many groups the limiter lets in; size and inserts count promised ones too.
local function limiter_room(limiter, size, inserts, samples)
  if limiter.max_diff > 1e300 then return math.huge end  -- what settings without a bound are sent as
  local free = math.max(0, limiter.min_size - size)
  local bound = (limiter.max_diff + samples) / limiter.samples_per_insert - inserts
  return math.max(free, math.floor(bound + 1e-9))
end

local function may_sample(limiter, n, size, inserts, samples)
  local diff = inserts * limiter.samples_per_insert - samples - n
  return size >= limiter.min_size and diff >= limiter.min_diff - 1e-9
end

-- The arithmetic of lookahead.py.
local NUM_DRAWS, MOST_DOUBLINGS, FIRST_STEPS, MORE_EVERY_MS = 8, 4, 5, 5000

local function most_outstanding(admitted, step, window)
  if admitted < 0 then admitted = FIRST_STEPS * step end
  return math.max(step, math.min(admitted, window))
end

local function reserve(step) return math.ceil(step / 4) end

-- Returns admitted and num_doublings; nothing is counted then, and no cut is behind it.
local function short_of(admitted, num_doublings, was_cut, num_missing, step, window)
  local most = most_outstanding(admitted, step, window)
  if admitted < 0 then return most, 0 end  -- the first draw of all
  local more = math.max(reserve(step), num_missing)
  return math.min(window, most + more), math.min(MOST_DOUBLINGS, num_doublings + was_cut)
end

-- Returns admitted, most_needed, num_draws and was_cut behind a draw.
local function after_draw(
  admitted, most, num_draws, num_doublings, was_cut,
  num_left, num_outstanding, was_blocked, step, window)
  admitted = most_outstanding(admitted, step, window)
  if was_blocked then return math.min(window, admitted + reserve(step)), 0, 0, was_cut end
  local needed = num_outstanding - num_left
  most = num_draws <= 0 and needed or math.max(most, needed)
  num_draws = num_draws + 1
  if num_draws < NUM_DRAWS * 2 ^ num_doublings then return admitted, most, num_draws, was_cut end
  local wanted = math.max(step, most + reserve(step))
  if wanted >= admitted then return admitted, 0, 0, was_cut end
  return wanted, 0, -math.ceil(admitted / step), 1
end
