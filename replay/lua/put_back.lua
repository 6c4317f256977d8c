-- Store a group that was taken out of a buffer, under its own record. It fills no slot and asks no
-- limit; the payload has been set as for add.lua.
local payload = PAYLOAD .. arg.id
if call('HEXISTS', key.groups, arg.id) == 1 then return 'held' end
if arg.draws > 0 and arg.draws >= c.max_draws then
  call('UNLINK', payload)
  return 'trained'
end
local size = call('STRLEN', payload)
if size == 0 then return 'no-payload' end
call('PERSIST', payload)
S.sequence = S.sequence + 1
S.inserts = S.inserts + 1
S.samples = S.samples + arg.draws
S.num_stored = S.num_stored + 1
S.num_bytes = S.num_bytes + size
S.largest = math.max(S.largest, size)
local group = {
  arg.version, arg.newest, S.sequence, arg.draws, arg.returns, size, arg.priority, arg.shape}
write(arg.id, group)
put(arg.id, group)
if arg.draws == 0 then count(S.ready, arg.version, 1) end
if num_ready() >= c.groups_per_step then wake_data() end
save()
return 'added'
