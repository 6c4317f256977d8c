-- The arithmetic of selection.py: the lowest score goes first.

local ARRIVALS = 4294967296  -- 2^32; a double holds version and arrival exactly

local function exponential(seed, arrival, turn)
  local digest = redis.sha1hex(string.format('%d:%d:%d', seed, arrival, turn))
  return -math.log((tonumber(string.sub(digest, 1, 13), 16) + 1) / 4503599627370496)
end

local function fixed_score(selector, version, arrival)
  local place = version * ARRIVALS + arrival
  if selector == 'fifo' then return place end
  return selector == 'lifo' and -arrival or -place
end

local function draw_score(selector, version, arrival, priority, from, seed, turn)
  if selector == 'uniform' then return from + exponential(seed, arrival, turn) end
  if selector == 'prioritised' then
    return from + exponential(seed, arrival, turn) / math.max(priority, 1e-6)
  end
  return fixed_score(selector, version, arrival)
end

local function evict_score(selector, version, arrival, priority, from, seed, turn)
  if selector == 'uniform' then return from + exponential(seed, -arrival, turn) end
  if selector == 'prioritised' then return priority + arrival * 1e-9 end
  return fixed_score(selector, version, arrival)
end

local function rescaled(score, before, after, from)
  return from + (score - from) * math.max(before, 1e-6) / math.max(after, 1e-6)
end
