-- Fleet time in ms, and this server's time: the first goes as the second does, but for its leaps.
-- `key` holds two doubles: the server's time when it was last looked at, and fleet time then. Every
-- gateway looks once a second. So when more than LOOK seems to have gone by, or less than nothing, the
-- clock has leapt or nobody was there: fleet time stands still until a gateway comes that can tell,
-- with `passed`: the ms that its own steady clock has counted since it last looked. To it the third answer
-- is by how many ms the server's clock has leapt.
local LOOK, WRITE, KEEP = 5000, 100, 30 * 86400000
local function fleet_time(key, passed)
  local time = redis.call('TIME')
  local server = time[1] * 1000 + math.floor(time[2] / 1000)
  local known = redis.call('GET', key)
  local before, fleet = server, server
  if known then
    before, fleet = struct.unpack('<dd', known)
  end
  local step = server - before
  if step < 0 or step > LOOK then
    if not passed then
      return fleet, server, 0
    end
    step = math.max(0, math.min(step, passed))
  elseif known and step < WRITE then
    return fleet + step, server, 0 -- not written: that is as good, and ten writes a second are enough
  end
  redis.call('SET', key, struct.pack('<dd', server, fleet + step), 'PX', KEEP)
  return fleet + step, server, server - before - step
end
