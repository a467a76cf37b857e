--[[ Starts the books of a slot without a mark, and sets the mark: all or nothing.

args     1. the mark   2. the milliseconds it is kept   3. the milliseconds that all else is kept   4. how many words of f
         follow, and these: moments and fields   then the words of w: fields and values
Reply    1, or 0 if the slot has a mark
]]

local function call_with_many(command, key, words, first, last)
  for from = first, last, 1000 do
    redis.call(command, key, unpack(words, from, math.min(from + 999, last)))
  end
end

local function seed(keys, args)
  if redis.call('EXISTS', keys[1]) == 1 then return 0 end
  local last = 4 + tonumber(args[4])
  redis.call('DEL', keys[2], keys[3], keys[4])
  call_with_many('ZADD', keys[4], args, 5, last)
  call_with_many('HSET', keys[2], args, last + 1, #args)
  redis.call('PEXPIRE', keys[4], args[3])
  redis.call('PEXPIRE', keys[2], args[3])
  redis.call('SET', keys[1], args[1], 'PX', args[2])
  return 1
end

register('seed', seed)
