-- With fleet_time.lua.
-- A look at the clock of the fleet. KEYS: clock. ARGV: the ms that have passed since this gateway's last
-- look, by its own clock; 'first' when it has just started, and knows of no leap; '' for a mere look.
-- Returns fleet time, and by how much this server's clock was found to have leapt, both in ms.
local passed = ARGV[1] == 'first' and math.huge or tonumber(ARGV[1])
local now, _, leap = fleet_time(KEYS[1], passed)
return {now, leap}
