-- With fleet_time.lua.
-- A request is over: what it held is given back, what it used is charged, and its record is written.
-- Once: whoever comes second changes nothing.
-- KEYS: open, holds, settled ids by when they were, the records' stream, use, clock, then slots.
-- ARGV: now in ms (0: fleet time, and this server's for the windows of budgets), id, input, output
-- and cost that were reserved, then that were used, how long settled ids are kept in ms, the stream's
-- length, 'held' when only an open hold may be settled, the record, the plan; PLAN and STATE as in
-- admit.lua.
-- Returns 1; 2 when there was no hold any more; 0 when it was settled before.
local MINUTE, DAY, FORM, BUDGET = 60000, 86400000, '<dddddddddd', '<ddd'
local now, today = tonumber(ARGV[1]), tonumber(ARGV[1])
if now == 0 then
  now, today = fleet_time(KEYS[6])
end
local id = ARGV[2]
local held = redis.call('HDEL', KEYS[2], id) == 1
redis.call('ZREM', KEYS[1], id)
if not held then
  if ARGV[11] == 'held' or redis.call('ZSCORE', KEYS[3], id) then
    return 0
  end
end
local old = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[9], 'LIMIT', 0, 8)
if #old > 0 then -- more go than come, and never so many that others wait
  redis.call('ZREM', KEYS[3], unpack(old))
end
redis.call('ZADD', KEYS[3], now, id)
redis.call('PEXPIRE', KEYS[3], DAY)
local back = held and 1 or 0
local input, output, cost = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local give_input, give_output, give_cost = ARGV[3] * back, ARGV[4] * back, ARGV[5] * back
local plan = cmsgpack.unpack(ARGV[13])
local count = plan[1]

local function charged(used, cap, period, idle, amount)
  return cap < 0 and used or math.max(0, used - cap * idle / period) + amount
end

local stored = count > 0 and redis.call('HMGET', KEYS[5], unpack(plan, 2, count + 1)) or {}
local states, p = {}, count + 2
for i = 1, count do
  local at, hi, ho, hm, r, inp, out, tok, day = now, 0, 0, 0, 0, 0, 0, 0, 0
  if stored[i] then
    local _
    _, at, hi, ho, hm, r, inp, out, tok, day = struct.unpack(FORM, stored[i])
  end
  local idle = math.max(0, now - at)
  r = charged(r, plan[p], MINUTE, idle, 1 - back)
  inp = charged(inp, plan[p + 1], MINUTE, idle, input)
  out = charged(out, plan[p + 2], MINUTE, idle, output)
  tok = charged(tok, plan[p + 3], MINUTE, idle, input + output)
  day = charged(day, plan[p + 4], DAY, idle, input + output)
  local last, bounded = plan[p + 6], plan[p + 7]
  local spent = {}
  for from = 81, stored[i] and #stored[i] or 0, 24 do
    local code, start, amount = struct.unpack(BUDGET, stored[i], from)
    spent[code] = {start, amount}
  end
  for b = p + 8, p + 4 + 4 * bounded, 4 do
    local code, start = plan[b], plan[b + 2]
    if not spent[code] or (start > spent[code][1] and start <= today) then
      spent[code] = {start, 0}
    end
    spent[code][2] = spent[code][2] + (code < 200 and cost or input + output)
  end
  local kept = ''
  for code, window in pairs(spent) do
    kept = kept .. struct.pack(BUDGET, code, window[1], window[2])
  end
  local forget = last < 0 and -1 or math.max(today, last) + DAY
  states[2 * i - 1] = plan[i + 1]
  states[2 * i] = struct.pack(
    FORM, forget, math.max(now, at), math.max(0, hi - give_input), math.max(0, ho - give_output),
    math.max(0, hm - give_cost), r, inp, out, tok, day
  ) .. kept
  p = p + 8 + 4 * bounded
end
if count > 0 then
  redis.call('HSET', KEYS[5], unpack(states))
end
for i = 7, #KEYS do
  redis.call('ZREM', KEYS[i], id)
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[10], '*', 'p', ARGV[12])
return 2 - back
