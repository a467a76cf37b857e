--[[ The books as they lie, changing nothing: whoever asks brings them to the moment. On its own, without rule.lua.

KEYS     as in rule.lua
Reply    1. the moment, microseconds   2. the mark, or nothing   3. per scope: its hash :w as flat pairs
         4. per scope: its leases as flat pairs
]]

local time = redis.call('TIME')
local windows, leases = {}, {}
for index = 1, (#KEYS - 1) / 3 do
  windows[index] = redis.call('HGETALL', KEYS[3 * index - 1])
  leases[index] = redis.call('HGETALL', KEYS[3 * index])
end
return { string.format('%.0f', time[1] * 1e6 + time[2]), redis.call('GET', KEYS[1]), windows, leases }
