-- A request is over: what it held is given back, what it used is charged, and its record is written.
-- Once: whoever comes second changes nothing.
-- KEYS: open, holds, ids settled in this period, the records' stream, a state per scope, then slots.
-- ARGV: now in ms (0: this server's clock), id, input, output and cost that were reserved, then that
-- were used, the number of scopes, how long settled ids are kept in ms, the record (empty: none), the
-- stream's length, 'held' when only an open hold may be settled, a plan per scope.
-- Returns 1, or 0 when it was settled before.
local MINUTE, DAY = 60000, 86400000
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local id = ARGV[2]
local held = redis.call('ZREM', KEYS[1], id) == 1
redis.call('HDEL', KEYS[2], id)
if not held then
  if ARGV[13] == 'held' or redis.call('SISMEMBER', KEYS[3], id) == 1 then
    return 0
  end
end
redis.call('SADD', KEYS[3], id)
redis.call('PEXPIRE', KEYS[3], ARGV[10])
local input, output, cost = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local count = tonumber(ARGV[9])

local function charge(state, field, cap, period, amount)
  local used = (state[field] or 0) - cap * math.max(0, now - state.at) / period
  state[field] = math.max(0, used) + amount
end

for i = 1, count do
  local key = KEYS[4 + i]
  local stored = redis.call('GET', key)
  local state = stored and cmsgpack.unpack(stored) or {at = now, hi = 0, ho = 0, hm = 0}
  local plan = cmsgpack.unpack(ARGV[13 + i])
  if plan[1] >= 0 then
    charge(state, 'r', plan[1], MINUTE, held and 0 or 1)
  end
  if plan[2] >= 0 then
    charge(state, 'i', plan[2], MINUTE, input)
  end
  if plan[3] >= 0 then
    charge(state, 'o', plan[3], MINUTE, output)
  end
  if plan[4] >= 0 then
    charge(state, 't', plan[4], MINUTE, input + output)
  end
  if plan[5] >= 0 then
    charge(state, 'd', plan[5], DAY, input + output)
  end
  state.at = math.max(now, state.at)
  if held then
    state.hi = math.max(0, state.hi - tonumber(ARGV[3]))
    state.ho = math.max(0, state.ho - tonumber(ARGV[4]))
    state.hm = math.max(0, state.hm - tonumber(ARGV[5]))
  end
  for _, budget in ipairs(plan[7]) do
    local field = budget[1] .. budget[2]
    state.b = state.b or {}
    local spent = state.b[field]
    if not spent or (budget[4] > spent[1] and budget[4] <= now) then
      spent = {budget[4], 0}
      state.b[field] = spent
    end
    spent[2] = spent[2] + (budget[1] == 'm' and cost or input + output)
  end
  if plan[8] < 0 then
    redis.call('SET', key, cmsgpack.pack(state))
  else
    local ttl = math.max(DAY, plan[8] - now + DAY)
    redis.call('SET', key, cmsgpack.pack(state), 'PX', string.format('%d', ttl))
  end
end
for i = 5 + count, #KEYS do
  redis.call('ZREM', KEYS[i], id)
end
if ARGV[11] ~= '' then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[12], '*', 'p', ARGV[11])
end
return 1
