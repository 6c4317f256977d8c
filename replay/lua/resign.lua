-- `id` leads the run no longer; if another does, nothing changes.
if redis.call('GET', key.leader) == arg.id then redis.call('DEL', key.leader) end
return 'ok'
