--[[ One sidecar says that it lives; how many do.

keys     weir:sidecars, a sorted set: sidecar -> when it was last heard, in microseconds
args     1. the sidecar   2. the milliseconds for which one counts as living
Reply    how many live
]]

local function sidecars(keys, args)
  local time = redis.call('TIME')
  local now = time[1] * 1e6 + time[2]
  redis.call('ZADD', keys[1], now, args[1])
  redis.call('ZREMRANGEBYSCORE', keys[1], '-inf', now - args[2] * 1000)
  redis.call('PEXPIRE', keys[1], args[2])
  return redis.call('ZCARD', keys[1])
end

register('sidecars', sidecars)
