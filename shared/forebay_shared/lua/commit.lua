-- Changes records of the directory, all or none.
-- KEYS: directory, revision, changes, audit.
-- ARGV: length of changes, of audit; who; the audit's entry; the codec's version; the directory's
-- revision at which the changes were found to fit together; then for each record: place, the revision
-- that it must have (-1: any; 0: none), its JSON (empty: delete).
-- Returns {1, the directory's revision after}; {2, the number of the record that was not as wanted}; or
-- {3, the directory's revision} when others have changed it since: whoever asks must look again.
local FIRST = 7
local count = (#ARGV - FIRST + 1) / 3
for i = 0, count - 1 do
  local wanted = tonumber(ARGV[FIRST + 1 + i * 3])
  if wanted >= 0 then
    local stored = redis.call('HGET', KEYS[1], ARGV[FIRST + i * 3])
    local revision = stored and tonumber(string.match(stored, '^%d+')) or 0
    if revision ~= wanted then
      return {2, i + 1}
    end
  end
end
local revision = tonumber(redis.call('GET', KEYS[2]) or '0')
if revision ~= tonumber(ARGV[6]) then
  return {3, revision}
end
for i = 0, count - 1 do
  local place, value = ARGV[FIRST + i * 3], ARGV[FIRST + 2 + i * 3]
  revision = revision + 1
  if value == '' then
    redis.call('HDEL', KEYS[1], place)
  else
    redis.call('HSET', KEYS[1], place, string.format('%d %s', revision, value))
  end
  local packet = cmsgpack.pack({tonumber(ARGV[5]), '', {{'changed', revision, place, value}}})
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'p', packet)
end
redis.call('SET', KEYS[2], string.format('%d', revision))
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[2], '*', 'who', ARGV[3], 'what', ARGV[4])
return {1, revision}
