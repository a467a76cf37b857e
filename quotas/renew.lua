--[[ Keeps one account's leases alive; unknown and expired ones are passed over. Behind rule.lua.

ARGV[1]  also: names (the leases)
Reply    how many were renewed
]]

if not mark then return 0 end
local renewed = 0
local scopes, now = load_scopes()
for index, scope in ipairs(scopes) do
  for _, name in ipairs(args.names) do
    local lease = live(scope, name)
    if lease then
      lease.expires = now + args.lease
      write_lease(scope, name, lease)
      call_back(scope, name, lease.expires)
      if index == 1 then renewed = renewed + 1 end
    end
  end
  save(scope, now)
end
return renewed
