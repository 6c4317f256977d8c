-- Write a request to the learner unless one of its action is open. The one that stands.
local text = redis.call('HGET', key.requests, arg.action)
if text then
  local held = cjson.decode(text)
  local is_open = held.state == 'working'
    or (held.state == 'waiting' and arg.now <= held.deadline_at)
  if is_open or held.request_id == arg.request_id then return text end
end
redis.call('HSET', key.requests, arg.action, arg.record)
return arg.record
