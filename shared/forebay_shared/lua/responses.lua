-- The responses of one team: kept, changed and forgotten, each step atomic.
--
-- KEYS: 1 index (sorted set: id -> when it was kept, us), 2 sizes (hash: id -> bytes, '' -> their
-- sum), 3 running (sorted set: id -> when its owner last said that it runs, ms). ARGV: 1 the step,
-- 2 the prefix of the responses' keys, 3 the prefix of their events' keys, 4 a response's id; then
-- what the step takes. All keys share one hash tag. A response is a hash: response, input, status,
-- previous; while it runs in the background also owner and beat, and missed when it was found silent.

local index, sizes, running = KEYS[1], KEYS[2], KEYS[3]
local step, prefix, events, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = prefix .. id
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local now_us = clock[1] * 1000000 + clock[2]

local function live(status)
  return status == 'queued' or status == 'in_progress'
end

local function uncount(one)
  local size = redis.call('HGET', sizes, one)
  if size then
    redis.call('HDEL', sizes, one)
    redis.call('HINCRBY', sizes, '', -tonumber(size))
  end
  redis.call('ZREM', index, one)
end

local function forget(one)
  redis.call('DEL', prefix .. one, events .. one)
  redis.call('ZREM', running, one)
  uncount(one)
end

-- Counts a response and makes room for it: what has expired goes, then the oldest.
local function count(size, ttl, most, bytes)
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now_us - ttl * 1000, 'LIMIT', 0, 256)) do
    uncount(one)
  end
  local before = tonumber(redis.call('HGET', sizes, id) or 0)
  redis.call('HSET', sizes, id, size)
  local total = redis.call('HINCRBY', sizes, '', size - before)
  redis.call('ZADD', index, now_us, id)
  redis.call('PEXPIRE', key, ttl)
  redis.call('PEXPIRE', sizes, ttl)
  redis.call('PEXPIRE', index, ttl)
  local evicted = 0
  while total > bytes or redis.call('ZCARD', index) > most do
    local oldest = redis.call('ZRANGE', index, 0, 0)[1]
    if oldest == id or not oldest then
      break
    end
    forget(oldest)
    evicted = evicted + 1
    total = tonumber(redis.call('HGET', sizes, ''))
  end
  return evicted
end

-- A response whose owner has said nothing for so long is lost, and says so. Or this server's clock has
-- leapt: so it is looked at twice, with time for several beats between, and each begins all anew.
local function lose(one, silence)
  local known = redis.call('HMGET', prefix .. one, 'status', 'beat', 'missed')
  local beat, missed = tonumber(known[2] or 0), tonumber(known[3] or now)
  if not live(known[1]) or (beat <= now and now - beat <= silence) then
    return
  end
  if beat > now or missed > now or not known[3] then
    redis.call('HSET', prefix .. one, 'beat', math.min(beat, now), 'missed', now)
  elseif now - missed > silence / 3 then
    redis.call('HSET', prefix .. one, 'status', 'failed', 'lost', '1')
    redis.call('HDEL', prefix .. one, 'owner')
    redis.call('ZREM', running, one)
  end
end

local steps = {}

-- size, ttl, most, bytes, response, input, status, previous -> number of responses that went for it
function steps.keep()
  redis.call('HSET', key, 'response', ARGV[9], 'input', ARGV[10], 'status', ARGV[11],
    'previous', ARGV[12])
  return count(tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
end

-- the same, then owner, silence, limit -> -1: so many run already
function steps.begin()
  local silence = tonumber(ARGV[14])
  local limit = tonumber(ARGV[15])
  if redis.call('ZCARD', running) >= limit then
    for _, one in ipairs(redis.call('ZRANGE', running, 0, -1)) do
      lose(one, silence)
      if not live(redis.call('HGET', prefix .. one, 'status')) then
        redis.call('ZREM', running, one)
      end
    end
  end
  if redis.call('ZCARD', running) >= limit then
    return -1
  end
  redis.call('ZADD', running, now, id)
  redis.call('PEXPIRE', running, ARGV[6])
  redis.call('HSET', key, 'owner', ARGV[13], 'beat', now)
  return steps.keep()
end

-- owner, status -> the status; '' when it is gone or another's
function steps.beat()
  local known = redis.call('HMGET', key, 'owner', 'status')
  if known[1] ~= ARGV[5] or not live(known[2]) then
    return known[1] and known[2] or ''
  end
  redis.call('HSET', key, 'beat', now, 'status', ARGV[6])
  redis.call('HDEL', key, 'missed')
  redis.call('ZADD', running, 'XX', now, id)
  return ARGV[6]
end

-- size, ttl, most, bytes, response, status, owner -> number that went for it; -1: it is gone,
-- cancelled or another's
function steps.settle()
  local known = redis.call('HMGET', key, 'owner', 'status')
  if known[1] ~= ARGV[11] or not live(known[2]) then
    return -1
  end
  redis.call('HSET', key, 'response', ARGV[9], 'status', ARGV[10])
  redis.call('HDEL', key, 'owner', 'beat')
  redis.call('ZREM', running, id)
  return count(tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
end

-- silence -> response, input, status, lost
function steps.read()
  lose(id, tonumber(ARGV[5]))
  return redis.call('HMGET', key, 'response', 'input', 'status', 'lost')
end

-- silence -> the same, cancelled if it was running
function steps.cancel()
  lose(id, tonumber(ARGV[5]))
  if live(redis.call('HGET', key, 'status')) then
    redis.call('HSET', key, 'status', 'cancelled')
    redis.call('ZREM', running, id)
  end
  return redis.call('HMGET', key, 'response', 'input', 'status', 'lost')
end

-- -> whether there was one
function steps.delete()
  local known = redis.call('EXISTS', key)
  forget(id)
  return known
end

-- silence, most, bytes -> a word, then response and input of each, the newest first
function steps.chain()
  local found, size, next_id = {'ok'}, 0, id
  while next_id ~= '' do
    lose(next_id, tonumber(ARGV[5]))
    local one = redis.call('HMGET', prefix .. next_id, 'response', 'input', 'status', 'previous')
    if not one[1] then
      return {next_id == id and 'missing' or 'broken'}
    end
    if one[3] ~= 'completed' and one[3] ~= 'incomplete' then
      return {'unfinished'}
    end
    size = size + #one[1] + #one[2]
    if #found > 2 * tonumber(ARGV[6]) or size > tonumber(ARGV[7]) then
      return {'long'}
    end
    table.insert(found, one[1])
    table.insert(found, one[2])
    next_id = one[4] or ''
  end
  return found
end

return steps[step]()
