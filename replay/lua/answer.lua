-- Write how far a request is, unless another has taken its place, it is over, or it was not taken up
-- by its deadline. 1: written.
local text = redis.call('HGET', key.requests, arg.action)
if not text then return 0 end
if text == arg.record then return 1 end
local held = cjson.decode(text)
if held.request_id ~= arg.request_id then return 0 end
local is_open = held.state == 'working'
  or (held.state == 'waiting' and arg.now <= held.deadline_at)
if not is_open then return 0 end
redis.call('HSET', key.requests, arg.action, arg.record)
return 1
