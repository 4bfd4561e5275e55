-- Open requests go on: their leases are made long again. What is not open any more stays so.
-- KEYS: open, slots of the request. ARGV: now in ms (0: this server's clock), id, lease in ms.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local lease = tonumber(ARGV[3])
for i, key in ipairs(KEYS) do
  if redis.call('ZSCORE', KEYS[1], ARGV[2]) then
    redis.call('ZADD', key, now + lease, ARGV[2])
    if i > 1 then
      redis.call('PEXPIRE', key, lease * 4)
    end
  end
end
return 1
