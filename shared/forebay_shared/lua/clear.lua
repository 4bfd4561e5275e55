-- Deletes what a dead process left, unless it lives after all.
-- KEYS: its lease, then the rest. Returns 1 when it was dead, 0 when it lives.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('DEL', unpack(KEYS, 2))
return 1
