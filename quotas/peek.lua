--[[ The books as they lie, changing nothing: whoever asks brings them to the moment.

args     the scopes
Reply    the moment, the mark or nothing, and flat pairs of w: the scopes, their windows' slots, all leases of the slot
]]

-- The fields of leases that have expired and are remembered.
local function add_remembered(fields)
  for _, field in ipairs(redis.call('ZRANGE', SLOT.f, 0, -1)) do
    if string.sub(field, 1, 2) == 'l:' then fields[#fields + 1] = field end
  end
end

local function peek(keys, args)
  clear_slot(keys)
  local fields, flat = {}, {}
  for index, packed in ipairs(redis.call('HMGET', SLOT.w, unpack(args))) do
    if packed then
      local scope = new_scope()
      load_scope(scope, args[index], nil, packed)
      open_windows(scope)
      fields[#fields + 1] = args[index]
      add_slots(fields, scope.cap)
      add_slots(fields, scope.rate)
      add_slots(fields, scope.repay)
    end
  end
  add_leases(fields, -1)
  add_remembered(fields)
  add_pairs(flat, fields)
  return { moment_of(redis.call('TIME')), redis.call('GET', SLOT.mark), flat }
end

redis.register_function({ function_name = PREFIX .. 'peek', callback = peek, flags = { 'no-writes' } })
