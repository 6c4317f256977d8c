-- Give stored groups other priorities; returns how many of them are stored.
local num_found = 0
for i, id in ipairs(arg.ids) do
  local packed = call('HGET', key.groups, id)
  if packed then
    num_found = num_found + 1
    local group = cmsgpack.unpack(packed)
    group[PRIORITY] = arg.priorities[i]
    write(id, group)
    if call('ZSCORE', key.ready, id) or call('ZSCORE', key.again, id) then put(id, group) end
  end
end
return num_found
