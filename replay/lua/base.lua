-- What every script of the buffer starts with. `key` (name -> Redis key), `arg` (named arguments), `S`
-- (the state) and `c` (the limits) are written by scripts.py as what costs least: a concatenation, and
-- places of an array. The counters of the buffer are one value, `S`, read here and written by save():
-- a script that changes anything ends with it. The functions are those of rule.lua, select.lua and
-- library.lua that the script names, and what has become due since the last script, such as expired
-- slots and leases, is done by tidy.lua before it.

-- Needed on Redis 6, where a script may not write after TIME otherwise; gone from later servers.
if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call

local LAYOUT = 7                   -- of the keys and of what they hold
local REMEMBERED_MS = 3600 * 1000  -- how long a repeated add or acknowledge is recognised

-- The state: its numbers, then what else there is.
local STATE = '>ddddddddddddddddddddddddddddddddd'
local S
local packed_state = redis.pcall('GET', key.state)
if packed_state then
  local is_text = type(packed_state) == 'string'
  local is_ours = is_text and #packed_state > 264 and string.byte(packed_state) == 64
  local layout = is_ours and struct.unpack('>d', packed_state)
  if layout ~= LAYOUT then
    local other = is_text and not is_ours and cmsgpack.unpack(packed_state).layout
    return redis.error_reply('LAYOUT ' .. (layout or other or 1) .. ' ' .. LAYOUT)
  end
  S = {struct.unpack(STATE, packed_state)}
  -- What stands behind the last number is where the rest begins.
  S.room_signal, S.data_signal, S.paused, S.has_ceilings, S.playing, S.ready, S.leased,
    S.next_expiry, S.schema, S.config = unpack(
      cmsgpack.unpack(string.sub(packed_state, S.room_signal)), 1, 10)
  -- Before anything is leased or dropped: whoever cannot read what is stored must not touch it.
  if S.schema ~= arg.schema and S.num_stored > 0 then
    return redis.error_reply('SCHEMA ' .. S.schema .. ' ' .. arg.schema)
  end
else
  S = {
    LAYOUT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, -1, 0,
    '0-0', '0-0', false, false, {}, {}, {}, false, false, false}
end
S.schema = arg.schema

-- Limits and orders of the caller; who only looks has none, and goes by those of the last who had.
local is_new_config = ARGV[2] and ARGV[2] ~= S.config
-- Bytes 49 to 80 are the limiter's four numbers.
local is_new_limiter = is_new_config and S.config
  and string.sub(ARGV[2], 49, 80) ~= string.sub(S.config, 49, 80)
if is_new_config then S.config = ARGV[2] end
local LIMITS = '>ddddddddddddddsss'
local c = {struct.unpack(LIMITS, S.config or struct.pack(
  LIMITS, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 'pace', 'fifo', 'fifo'))}
if c.max_bytes > 1e300 then c.max_bytes = false end

local function save()
  call('SET', key.state, struct.pack(STATE, unpack(S, 1, 33)) .. cmsgpack.pack({unpack(S, 34, 43)}))
end

local clock = call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + S.ahead
-- The server's clock may be set back; deadlines must not move away with it.
local is_set_back = now < S.now
if is_set_back then
  S.ahead = S.ahead + S.now - now
  now = S.now
end
S.now = now
local is_due = is_set_back or is_new_config or (S.next_expiry and now >= S.next_expiry)
