-- Changes records of the directory, all or none.
-- KEYS: directory, revision, changes, audit.
-- ARGV: length of changes, of audit; who; the audit's entry; the codec's version; then for each
-- record: place, the revision that it must have (-1: any; 0: none), its JSON (empty: delete).
-- Returns the directory's revision after, or minus the number of the record that was not as wanted.
local count = (#ARGV - 5) / 3
for i = 0, count - 1 do
  local wanted = tonumber(ARGV[7 + i * 3])
  if wanted >= 0 then
    local stored = redis.call('HGET', KEYS[1], ARGV[6 + i * 3])
    local revision = stored and tonumber(string.match(stored, '^%d+')) or 0
    if revision ~= wanted then
      return -(i + 1)
    end
  end
end
local revision = tonumber(redis.call('GET', KEYS[2]) or '0')
for i = 0, count - 1 do
  local place, value = ARGV[6 + i * 3], ARGV[8 + i * 3]
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
return revision
