--[[ The end of a lease, running or expired: charges the rest, gives the holds back. Behind rule.lua.

ARGV[1]  also: name (the lease), consumed (tokens in all)
Reply    1 if the lease was known in any scope, else 0
]]

-- What an expired lease was booked with becomes what was used, in its slot; the rate learns of it now.
local function correct(scope, lease, now)
  local more = max(0, args.consumed - lease.consumed)
  if scope.books.cap then add(scope, 'h', scope.books.cap, lease.expires, more - lease.booked) end
  local meter, suffix = meter_of(scope, lease)
  if meter then charge_meter(scope, suffix, meter, now, more) end
end

local function close(scope, lease, now)
  if lease.booked then return correct(scope, lease, now) end
  charge(scope, lease, args.consumed, now)
  release(scope, lease, lease.rate_hold, lease.cap_hold)
  scope.books.running = scope.books.running - 1
end

if not mark then return 0 end
local known = 0
local scopes, now = load_scopes()
for _, scope in ipairs(scopes) do
  local lease = read_lease(scope, args.name)
  if lease then
    known = 1
    close(scope, lease, now)
    drop_lease(scope, args.name)
  end
  save(scope, now)
end
return known
