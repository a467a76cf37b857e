--[[ Charges what a lease consumed so far, renews it, extends its hold: in every scope or in none.

args     numbers: consumed (tokens in all), extend_to (tokens in all to be covered; below 0: as it is)
Reply    {the moment, expired 0|1, extended 0|1, covered, left}, see store.Progress; without the mark the moment is 0
]]

local function progress(keys, args)
  local lease_span, moment, consumed, extend_to = struct.unpack('<dddd', args[2])
  local field = args[3]
  local now, terms = load(keys, args, lease_span, moment)
  local lease = now and live(field)
  if not lease then
    if now then save(now, lease_span, terms) end
    return { now or 0, 1, 0, 0, 0 }
  end

  local first, second = scopes_of(lease)
  charge(lease, first, second, consumed, now)
  lease.expires = now + lease_span
  call_back(field, lease.expires)
  for index = 1, COUNT do
    if SCOPES[index].is_open then sum_up(SCOPES[index], now) end
  end

  local left = tightest()
  local more = math.max(0, extend_to - lease.consumed - lease.cap_hold)
  local extended = extend_to >= 0 and more <= left
  if extended then
    lease.cap_hold = lease.cap_hold + more
    first.cap_held = first.cap_held + more
    if second then second.cap_held = second.cap_held + more end
    left = left - more
  end
  write_lease(field, lease)
  save(now, lease_span, terms)
  return { now, 0, extended and 1 or 0, lease.consumed + lease.cap_hold, math.max(0, left) }
end

register('progress', progress)
