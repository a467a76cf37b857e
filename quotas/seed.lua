--[[ Starts the books of a slot without a mark, and sets the mark: all or nothing. On its own, without rule.lua.

KEYS     as in rule.lua
ARGV     the mark, the milliseconds it is kept, and then for each scope: the milliseconds its books are kept, how many
         words its hash :w is, and these as flat pairs
Reply    1, or 0 if the slot has a mark
]]

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local at = 3
for index = 2, #KEYS, 3 do
  local keep, words = ARGV[at], tonumber(ARGV[at + 1])
  redis.call('DEL', KEYS[index], KEYS[index + 1], KEYS[index + 2])
  redis.call('HSET', KEYS[index], 'g', ARGV[1], unpack(ARGV, at + 2, at + 1 + words))
  redis.call('PEXPIRE', KEYS[index], keep)
  at = at + 2 + words
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
