-- May this request start: checks every limit of every scope, then reserves in all of them, or in none.
-- KEYS: open, holds, a state per scope, then the slots of the scopes that bound concurrency.
-- ARGV: now in ms (0: this server's clock), id, lease in ms, input tokens, most output tokens, most
-- cost, the number of scopes, the hold for whoever must settle in our place; then a plan per scope:
-- {requests, input, output, tokens a minute, tokens a day, concurrent (-1: no limit), budgets of
-- {unit, window, amount, start, end}, when the last of them ends (0: none, -1: never)}.
-- A state has what was used of each bucket at the moment `at` (it drains at the limit's rate) and what
-- open requests hold. A bucket admits while one token is left of it, used and held together: so it
-- may be overdrawn by one request's reservation and no more.
-- Returns 1 or 0, then limit, remaining, ms until full again, for requests and for tokens (-1: no
-- limit); when refused: the scope's number, the limit's name, ms to wait.
local MINUTE, DAY, EPS = 60000, 86400000, 1e-6
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local id, lease = ARGV[2], tonumber(ARGV[3])
local input, output, cost = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local count = tonumber(ARGV[7])
if redis.call('ZSCORE', KEYS[1], id) then
  return {1, -1, 0, 0, -1, 0, 0} -- sent again: it is in
end
local wait, refused, name = -1, 0, ''
local shown = {-1, 0, 0, -1, 0, 0}

local function refuse(scope, limit, ms)
  if ms > wait then
    wait, refused, name = ms, scope, limit
  end
end

local function show(at, cap, left, full)
  if shown[at] < 0 or left < shown[at + 1] then
    shown[at], shown[at + 1], shown[at + 2] = cap, left, full
  end
end

local function bucket(scope, state, field, limit, cap, period, held, at, amount)
  local used = (state[field] or 0) - cap * (now - state.at) / period
  if used < 0 then
    used = 0
  end
  state[field] = used
  local over = used + held + 1 - cap
  if over > EPS then
    refuse(scope, limit, cap > 0 and math.max(1, over * period / cap) or period)
  end
  show(at, cap, math.max(0, cap - used - held - amount), cap > 0 and (used + held) * period / cap or period)
end

local names = {}
for i = 1, count do
  names[i] = KEYS[2 + i]
end
local stored = count > 0 and redis.call('MGET', unpack(names)) or {}
local states, plans, slots = {}, {}, {}
local slot = 2 + count
for i = 1, count do
  local state = stored[i] and cmsgpack.unpack(stored[i]) or {at = now, hi = 0, ho = 0, hm = 0}
  local plan = cmsgpack.unpack(ARGV[8 + i])
  states[i], plans[i] = state, plan
  if state.at > now then
    state.at = now
  end
  local tokens = state.hi + state.ho
  if plan[1] >= 0 then
    bucket(i, state, 'r', 'requests_per_minute', plan[1], MINUTE, 0, 1, 1)
  end
  if plan[2] >= 0 then
    bucket(i, state, 'i', 'input_tokens_per_minute', plan[2], MINUTE, state.hi, 4, input)
  end
  if plan[3] >= 0 then
    bucket(i, state, 'o', 'output_tokens_per_minute', plan[3], MINUTE, state.ho, 4, output)
  end
  if plan[4] >= 0 then
    bucket(i, state, 't', 'tokens_per_minute', plan[4], MINUTE, tokens, 4, input + output)
  end
  if plan[5] >= 0 then
    bucket(i, state, 'd', 'tokens_per_day', plan[5], DAY, tokens, 4, input + output)
  end
  if plan[6] >= 0 then
    slot = slot + 1
    slots[#slots + 1] = KEYS[slot]
    redis.call('ZREMRANGEBYSCORE', KEYS[slot], '-inf', now)
    if redis.call('ZCARD', KEYS[slot]) >= plan[6] then
      refuse(i, 'concurrent_requests', 1000)
    end
  end
  for _, budget in ipairs(plan[7]) do
    local field = budget[1] .. budget[2]
    state.b = state.b or {}
    local spent = state.b[field]
    -- A window begins when this server's clock says so, whatever a gateway's clock says.
    if not spent or (budget[4] > spent[1] and budget[4] <= now) then
      spent = {budget[4], 0}
      state.b[field] = spent
    end
    local held = budget[1] == 'm' and state.hm or tokens
    if spent[2] + held >= budget[3] then
      refuse(i, budget[2] .. '_budget', budget[5] > now and budget[5] - now or DAY)
    end
  end
  state.at = now
end

local answer = {wait < 0 and 1 or 0}
if wait < 0 then
  for i = 1, count do
    local state, plan = states[i], plans[i]
    if plan[1] >= 0 then
      state.r = state.r + 1
    end
    state.hi, state.ho, state.hm = state.hi + input, state.ho + output, state.hm + cost
    if plan[8] < 0 then
      redis.call('SET', KEYS[2 + i], cmsgpack.pack(state))
    else
      local ttl = math.max(DAY, plan[8] - now + DAY)
      redis.call('SET', KEYS[2 + i], cmsgpack.pack(state), 'PX', string.format('%d', ttl))
    end
  end
  for _, key in ipairs(slots) do
    redis.call('ZADD', key, now + lease, id)
    redis.call('PEXPIRE', key, lease * 4)
  end
  redis.call('ZADD', KEYS[1], now + lease, id)
  redis.call('HSET', KEYS[2], id, ARGV[8])
end
for i = 1, 6 do
  answer[i + 1] = math.floor(shown[i])
end
if wait >= 0 then
  answer[8], answer[9], answer[10] = refused, name, math.ceil(wait)
end
return answer
