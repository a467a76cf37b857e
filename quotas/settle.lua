--[[ The end of a lease, running or expired: charges the rest, gives the holds back.

args     numbers: consumed (tokens in all)
Reply    {the moment, 1 if the lease was known, else 0}; without the mark the moment is 0
]]

-- What an expired lease was booked with becomes what was used, in its slot; the rate learns of it now.
local function correct(lease, first, second, consumed, now)
  local more = math.max(0, consumed - lease.consumed)
  charge_cap(first, lease.expires, more - lease.booked, now)
  charge_cap(second, lease.expires, more - lease.booked, now)
  charge_rate(lease, first, second, more, now)
end

local function close(lease, consumed, now)
  local first, second = scopes_of(lease)
  if lease.booked >= 0 then return correct(lease, first, second, consumed, now) end
  charge(lease, first, second, consumed, now)
  stop(lease, first, second)
end

local function settle(keys, args)
  local lease_span, moment, consumed = struct.unpack('<ddd', args[2])
  local now, terms = load(keys, args, lease_span, moment)
  if not now then return { 0, 0 } end
  local lease = read_lease(args[3])
  if lease then
    close(lease, consumed, now)
    drop_lease(args[3])
  end
  save(now, lease_span, terms)
  return { now, lease and 1 or 0 }
end

register('settle', settle)
