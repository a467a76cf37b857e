--[[ Keeps one account's leases alive; unknown and expired ones are passed over.

args     after the scopes: more leases' fields
Reply    {the moment, how many were renewed}; without the mark the moment is 0
]]

local function renew_one(field, expires)
  local lease = live(field)
  if not lease then return 0 end
  lease.expires = expires
  write_lease(field, lease)
  call_back(field, expires)
  if SLOT.write_count >= 1000 then flush() end
  return 1
end

local function renew(keys, args)
  local lease_span, moment = struct.unpack('<dd', args[2])
  local now, terms = load(keys, args, lease_span, moment)
  if not now then return { 0, 0 } end
  local renewed = renew_one(args[3], now + lease_span)
  for index = 4 + COUNT, #args do
    renewed = renewed + renew_one(args[index], now + lease_span)
  end
  save(now, lease_span, terms)
  return { now, renewed }
end

register('renew', renew)
