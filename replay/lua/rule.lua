-- The arithmetic of schedule.py and limiter.py. Counts are tables of version -> number of groups.

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
local NUM_DRAWS, MOST_DOUBLINGS, FIRST_STEPS = 8, 4, 5

local function held(held_back, step, window)
  local wanted = held_back < 0 and window - FIRST_STEPS * step or held_back
  return math.max(0, math.min(wanted, window - step))
end

local function reserve(step) return math.ceil(step / 4) end

-- Returns held_back and num_doublings; nothing is counted then.
local function short_of(held_back, num_doublings, num_missing, step, window)
  local more = held_back > 0 and 1 or 0
  local given_back = math.max(reserve(step), num_missing)
  return math.max(0, held(held_back, step, window) - given_back),
    math.min(MOST_DOUBLINGS, num_doublings + more)
end

-- Returns held_back, most_needed, num_draws and num_doublings behind a draw.
local function after_draw(
  held_back, most, num_draws, num_doublings,
  num_left, num_outstanding, was_blocked, step, window)
  held_back = held(held_back, step, window)
  if was_blocked then return math.max(0, held_back - reserve(step)), 0, 0, num_doublings end
  local needed = num_outstanding - num_left
  most = num_draws <= 0 and needed or math.max(most, needed)
  num_draws = num_draws + 1
  if num_draws < NUM_DRAWS * 2 ^ num_doublings then
    return held_back, most, num_draws, num_doublings
  end
  local admitted = window - held_back
  local wanted = math.max(step, most + reserve(step))
  if wanted >= admitted then return held_back, 0, 0, num_doublings end
  return window - wanted, 0, -math.ceil(admitted / step), num_doublings
end
