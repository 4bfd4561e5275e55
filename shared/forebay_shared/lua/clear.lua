-- Deletes what a dead process left, unless it lives after all.
-- KEYS: its lease, then the rest. ARGV: the longest life of a lease in ms: one that would live longer
-- is of before the clock was put back. Returns 1 when it was dead, 0 when it lives.
local life = redis.call('PTTL', KEYS[1])
if life >= 0 and life <= tonumber(ARGV[1]) then
  return 0
end
redis.call('DEL', unpack(KEYS, 2))
return 1
