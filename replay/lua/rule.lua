-- The arithmetic of schedule.py, on tables of version -> count with numbers as keys.

local function due(counts, last_version)
  local total = 0
  for version, count in pairs(counts) do
    if version <= last_version then total = total + count end
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
  for version, count in pairs(counts) do
    if version + max_staleness >= learner_version then kept[version] = count end
  end
  return kept
end

-- Returns how many ready groups are missing, and the version up to which groups being played
-- must come first (nil: none).
local function drawable(ready, playing, learner_version, max_staleness, groups_per_step, policy)
  local usable = in_time(ready, learner_version, max_staleness)
  local num_ready = due(usable, math.huge)
  if policy == 'exact' then
    local newest
    for version in pairs(playing) do newest = math.max(newest or version, version) end
    return math.max(0, (max_staleness + 1) * groups_per_step - num_ready), newest
  end
  if num_ready < groups_per_step then return groups_per_step - num_ready, nil end
  local awaited = in_time(playing, learner_version, max_staleness)
  local first
  for _, counts in ipairs({usable, awaited}) do
    for last in pairs(counts) do
      local due_ready, due_playing = due(usable, last), due(awaited, last)
      local drawn = math.min(groups_per_step, due_ready)
      local later_steps = (last + max_staleness - learner_version) * groups_per_step
      local is_late = due_ready - drawn + due_playing > later_steps
      if is_late and due_playing > 0 and drawn < groups_per_step then
        first = math.min(first or last, last)
      end
    end
  end
  return 0, first
end
