-- With fleet_time.lua.
-- May this request start: checks every limit of every scope, then reserves in all of them, or in none.
-- KEYS: open, holds, use, clock, then the slots of the scopes that bound concurrency.
-- ARGV: now in ms (0: fleet time, and this server's for the windows of budgets), id, lease in ms,
-- input tokens, most output tokens, most cost, the hold for whoever must settle in our place but for
-- its last field, and that: the plan; 'started' for a request that runs already, as Redis was away: it
-- reserves whatever the limits say; how long slots are kept that nobody renews, in ms.
-- PLAN: the number of scopes, their names, then for each scope: requests, input, output and tokens a
-- minute, tokens a day, concurrent requests (-1: no limit), when its last budget ends (0: none, -1:
-- never), the number of its budgets, and for each {code, amount, start, end}; code is 100 for money, 200
-- for tokens, plus the window's number.
-- STATE of a scope, in `use`: doubles. When it may be forgotten (-1: never); the moment `at`; the
-- input, output and cost that open requests hold; what was used, at that moment, of the buckets of
-- requests, input, output and tokens a minute, tokens a day (it drains at the limit's rate); then
-- {code, start, spent} of each budget.
-- A bucket admits while one token is left of it, used and held together: so it may be overdrawn by one
-- request's reservation and no more.
-- Returns 1 or 0, then limit, remaining, ms until full again, for requests and for tokens (-1: no
-- limit); when refused: the scope's number, the limit's (1 to 5: the buckets, 6: concurrent requests,
-- else a budget's code), ms to wait.
local MINUTE, DAY, EPS, FORM, BUDGET = 60000, 86400000, 1e-6, '<dddddddddd', '<ddd'
local now, today = tonumber(ARGV[1]), tonumber(ARGV[1])
if now == 0 then
  now, today = fleet_time(KEYS[4])
end
local id, lease = ARGV[2], tonumber(ARGV[3])
local input, output, cost = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('HEXISTS', KEYS[2], id) == 1 then
  return {1, -1, 0, 0, -1, 0, 0} -- sent again: it is in
end
local plan = cmsgpack.unpack(ARGV[8])
local count = plan[1]
local wait, refused, limit = -1, 0, 0
local shown = {} -- of requests and of tokens the tightest bucket: {cap, level, amount, period}

local function refuse(scope, number, ms)
  if ms > wait then
    wait, refused, limit = ms, scope, number
  end
end

-- What is used of a bucket now. `kind` 1: requests, 2: tokens; `amount` is what is asked for.
local function bucket(scope, number, cap, period, used, held, idle, kind, amount)
  if cap < 0 then
    return used
  end
  used = math.max(0, used - cap * idle / period)
  local level = used + held
  if level + 1 - cap > EPS then
    refuse(scope, number, cap > 0 and math.max(1, (level + 1 - cap) * period / cap) or period)
  end
  local tightest = shown[kind]
  if not tightest or math.max(0, cap - level - amount) < math.max(0, tightest[1] - tightest[2] - tightest[3]) then
    shown[kind] = {cap, level, amount, period}
  end
  return used
end

-- What was spent of each budget, by code, as the state has it.
local function budgets(stored)
  local spent = {}
  for from = 81, #stored, 24 do
    local code, start, amount = struct.unpack(BUDGET, stored, from)
    spent[code] = {start, amount}
  end
  return spent
end

local stored = count > 0 and redis.call('HMGET', KEYS[3], unpack(plan, 2, count + 1)) or {}
local states, slots, p = {}, 0, count + 2
for i = 1, count do
  local at, hi, ho, hm, r, inp, out, tok, day = now, 0, 0, 0, 0, 0, 0, 0, 0
  if stored[i] then
    local _
    _, at, hi, ho, hm, r, inp, out, tok, day = struct.unpack(FORM, stored[i])
  end
  local idle = math.max(0, now - at)
  r = bucket(i, 1, plan[p], MINUTE, r, 0, idle, 1, 1)
  inp = bucket(i, 2, plan[p + 1], MINUTE, inp, hi, idle, 2, input)
  out = bucket(i, 3, plan[p + 2], MINUTE, out, ho, idle, 2, output)
  tok = bucket(i, 4, plan[p + 3], MINUTE, tok, hi + ho, idle, 2, input + output)
  day = bucket(i, 5, plan[p + 4], DAY, day, hi + ho, idle, 2, input + output)
  if plan[p + 5] >= 0 then
    slots = slots + 1
    redis.call('ZREMRANGEBYSCORE', KEYS[4 + slots], '-inf', now)
    if redis.call('ZCARD', KEYS[4 + slots]) >= plan[p + 5] then
      refuse(i, 6, 1000)
    end
  end
  local last, bounded = plan[p + 6], plan[p + 7]
  local kept = ''
  if bounded > 0 or (stored[i] and #stored[i] > 80) then
    local spent = budgets(stored[i] or '')
    for b = p + 8, p + 4 + 4 * bounded, 4 do
      local code, amount, start, ends = plan[b], plan[b + 1], plan[b + 2], plan[b + 3]
      -- A window begins when this server's clock says so, whatever a gateway's clock says.
      if not spent[code] or (start > spent[code][1] and start <= today) then
        spent[code] = {start, 0}
      end
      if spent[code][2] + (code < 200 and hm or hi + ho) >= amount then
        refuse(i, code, ends > today and ends - today or DAY)
      end
    end
    for code, window in pairs(spent) do
      kept = kept .. struct.pack(BUDGET, code, window[1], window[2])
    end
  end
  local forget = last < 0 and -1 or math.max(today, last) + DAY
  states[2 * i - 1] = plan[i + 1]
  states[2 * i] = struct.pack(
    FORM, forget, now, hi + input, ho + output, hm + cost, r + (plan[p] >= 0 and 1 or 0), inp, out, tok, day
  ) .. kept
  p = p + 8 + 4 * bounded
end

if ARGV[9] == 'started' then
  wait = -1
end
local answer = {wait < 0 and 1 or 0, -1, 0, 0, -1, 0, 0}
for kind = 1, 2 do
  if shown[kind] then -- as it is behind this request, which takes nothing when it is refused
    local cap, level, amount, period = unpack(shown[kind])
    level = level + (wait < 0 and amount or 0)
    answer[3 * kind - 1], answer[3 * kind] = cap, math.floor(math.max(0, cap - level))
    answer[3 * kind + 1] = math.floor(cap > 0 and level * period / cap or period)
  end
end
if wait >= 0 then
  answer[8], answer[9], answer[10] = refused, limit, math.ceil(wait)
  return answer
end
if count > 0 then
  redis.call('HSET', KEYS[3], unpack(states))
end
for i = 5, 4 + slots do
  redis.call('ZADD', KEYS[i], now + lease, id)
  redis.call('PEXPIRE', KEYS[i], ARGV[10])
end
redis.call('ZADD', KEYS[1], now + lease, id)
redis.call('HSET', KEYS[2], id, ARGV[7] .. ARGV[8])
return answer
