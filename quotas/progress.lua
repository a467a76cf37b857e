--[[ Charges what a lease consumed so far, renews it, extends its hold: in every scope or in none. Behind rule.lua.

ARGV[1]  also: name (the lease), consumed (tokens in all), extend_to (tokens in all to be covered; absent: as it is)
Reply    {expired 0|1, extended 0|1, covered, left}, see store.Progress
]]

if not mark then return { 1, 0, '0', '0' } end
local scopes, now = load_scopes()
local lease = live(scopes[1], args.name)
if not lease then
  for _, scope in ipairs(scopes) do
    save(scope, now)
  end
  return { 1, 0, '0', '0' }
end

local leases = {}
for index, scope in ipairs(scopes) do
  leases[index] = index == 1 and lease or live(scope, args.name)
  if leases[index] then
    charge(scope, leases[index], args.consumed, now)
    leases[index].expires = now + args.lease
    call_back(scope, args.name, leases[index].expires)
  end
end

local left = tightest(scopes)
local more = max(0, (args.extend_to or 0) - lease.consumed - lease.cap_hold)
local extended = args.extend_to and more <= left
for index, scope in ipairs(scopes) do
  local mine = leases[index]
  if mine then
    if extended then
      mine.cap_hold = mine.cap_hold + more
      scope.books.cap_held = scope.books.cap_held + more
    end
    write_lease(scope, args.name, mine)
  end
  save(scope, now)
end
if extended then left = left - more end
return { 0, extended and 1 or 0, text(lease.consumed + lease.cap_hold), text(max(0, left)) }
