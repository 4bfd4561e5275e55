-- Drops what scopes used whose last windows ended long ago.
-- KEYS: use. ARGV: scopes that looked so. A STATE begins with when it may be forgotten; see admit.lua.
-- Returns how many went.
local time = redis.call('TIME')
local now = time[1] * 1000
local gone = 0
for _, scope in ipairs(ARGV) do
  local state = redis.call('HGET', KEYS[1], scope)
  local at = state and struct.unpack('<d', state) or -1
  if at >= 0 and at < now then
    gone = gone + redis.call('HDEL', KEYS[1], scope)
  end
end
return gone
