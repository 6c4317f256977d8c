-- Give stored groups other priorities; returns how many of them are stored.
local num_found = 0
for i, id in ipairs(arg.ids) do
  local packed = call('HGET', key.groups, id)
  if packed then
    num_found = num_found + 1
    local group = read_record(packed)
    local before = group[PRIORITY]
    group[PRIORITY] = arg.priorities[i]
    write(id, group)
    local score = picks and call('ZSCORE', key.pick, id)
    if score and c.draw_by == 'prioritised' then
      call('ZADD', key.pick, rescaled(tonumber(score), before, group[PRIORITY], S.virtual), id)
    end
    if evicts and c.evict_by == 'prioritised' and call('ZSCORE', key.evict, id) then
      call('ZADD', key.evict, evict_score(
        c.evict_by, group[VERSION], group[ARRIVAL], group[PRIORITY], 0, c.seed, 0), id)
    end
  end
end
return num_found
