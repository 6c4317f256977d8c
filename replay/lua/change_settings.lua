-- Write settings in the place of those of revision `stands`. 1: written, 0: they are others by now.
local text = redis.call('GET', key.settings)
if text == arg.record then return 1 end
local revision = text and cjson.decode(text).revision or 0
if revision ~= arg.stands then return 0 end
redis.call('SET', key.settings, arg.record)
return 1
