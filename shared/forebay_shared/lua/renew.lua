-- With fleet_time.lua.
-- Open requests go on: their leases are made long again. What is not open any more stays so.
-- KEYS: clock, open, slots of the request. ARGV: now in ms (0: fleet time), id, lease in ms, and how
-- long slots are kept that nobody renews, in ms.
local now = tonumber(ARGV[1])
if now == 0 then
  now = fleet_time(KEYS[1])
end
local lease = tonumber(ARGV[3])
if redis.call('ZSCORE', KEYS[2], ARGV[2]) then
  for i = 2, #KEYS do
    redis.call('ZADD', KEYS[i], now + lease, ARGV[2])
    if i > 2 then
      redis.call('PEXPIRE', KEYS[i], ARGV[4])
    end
  end
end
return 1
