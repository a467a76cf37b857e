--[[ One admission: all limits of all scopes, all or none.

args     numbers: expected, first_hold, ceiling, cap_need, primary 0|1, forced 0|1
         after the scopes, for each target: its name, and its rate's tokens, span and slot as doubles, or nothing
Reply    nothing where the slot has no mark, else flat: the verdict, the moment, hold, ceiling, expected, target or '', the
         number (from 0) of the scope that refused, what the scopes answered about the primary (the key's, and four times
         the team's; 0: not asked); the record of each scope; and after a refusal by the cap or the rate, flat pairs of w: the windows' slots,
         the targets asked about and theirs, and the first leases to end
]]

local NUMBERS = '<dddddddd'
local TARGET = '<ddd'

local ANSWERS = {} -- what each scope said, where it was asked

local function terms_of_target(packed)
  local rate, span, slot = struct.unpack(TARGET, packed)
  return new_terms(rate, span, slot, 0, 0, 0, 0, 0, 0, 0, rate, -1)
end

local function target_takes(target, packed, expected, now)
  if packed == '' then return true end
  local meter, terms = open_target(target_field(SCOPES[1], target), now), terms_of_target(packed)
  tick_meter(meter, terms, now)
  local debt = owed(meter.debt, meter.since, meter.pace, meter.per, now)
  return answer(terms, now, meter.held + expected, debt, meter.rate.total, 0, -1) == BASE
end

-- The verdict that the primary would give, and the first scope that says no.
local function ask_primary(expected, now)
  local verdict, first_no = BASE, nil
  for index = 1, COUNT do
    local scope = SCOPES[index]
    local more = scope.held + expected
    local said = answer(scope.terms, now, more, scope.owed, scope.rate_total, scope.repay_total, scope.opened)
    ANSWERS[index] = said
    if said == NO then
      first_no = first_no or index
    elseif said == BURST then
      verdict = BURST
    end
  end
  return verdict, first_no
end

-- The first scope in which too many requests run already.
local function too_parallel()
  for index = 1, COUNT do
    local parallel = SCOPES[index].terms.parallel
    if parallel >= 0 and SCOPES[index].running >= parallel then return index end
  end
end

-- The verdict, ceiling and expected size; the target taken, or ''; the scope that refused; how many scopes were asked about
-- the primary.
local function decide(now, args, wanted, ceiling, cap_need, primary, forced)
  if forced == 1 then return primary == 1 and BASE or OVERFLOW, ceiling, wanted, '', 1, 0 end
  local which = too_parallel()
  if which then return PARALLEL, 0, 0, '', which, 0 end
  local left, tight = tightest()
  if left < cap_need then return CAP, 0, 0, '', tight, 0 end
  if left < ceiling then ceiling = left end
  local expected = wanted < ceiling and wanted or ceiling
  local first_no, asked = 1, 0
  if primary == 1 then
    local verdict
    verdict, first_no = ask_primary(expected, now)
    if not first_no then return verdict, ceiling, expected, '', 1, COUNT end
    asked = COUNT
  end
  for index = 4 + COUNT, #args, 2 do
    if target_takes(args[index], args[index + 1], expected, now) then
      return OVERFLOW, ceiling, expected, args[index], 1, asked
    end
  end
  return RATE, 0, expected, '', first_no, asked
end

-- What is held against a target's own rate: nothing, if it has none.
local function hold_target(target, expected)
  local meter = target ~= '' and read_target(target_field(SCOPES[1], target))
  if not meter then return 0 end
  meter.held, meter.moved = meter.held + expected, true
  return expected
end

-- Books the lease in every scope.
local function open_lease(now, args, expires, verdict, ceiling, hold, expected, target)
  local primary = verdict ~= OVERFLOW
  local rate_hold = primary and expected or hold_target(target, expected)
  for index = 1, COUNT do
    local scope = SCOPES[index]
    if primary then scope.held = scope.held + expected end
    scope.running = scope.running + 1
    scope.cap_held = scope.cap_held + hold
    scope.changed = true
    if verdict == BURST and ANSWERS[index] == BURST and not burst_open(scope.opened, scope.terms, now) then
      scope.opened = now
    end
  end
  local first, second = args[4], COUNT > 1 and args[5] or ''
  local packed = struct.pack(
    LEASE, verdict, now, expires, ceiling, hold, expected, rate_hold, hold, 0, -1,
    #first, first, #second, second, #target, target
  )
  put(args[3], packed)
  call_back(args[3], expires)
end

local function add_pairs(flat, fields)
  for from = 1, #fields, 1000 do
    local some = { unpack(fields, from, math.min(from + 999, #fields)) }
    for place, packed in ipairs(redis.call('HMGET', SLOT.w, unpack(some))) do
      if packed then
        flat[#flat + 1] = some[place]
        flat[#flat + 1] = packed
      end
    end
  end
end

-- The fields of leases by the list of those that are to expire, each once; `most` entries, or all (-1).
local function add_leases(fields, most)
  local known = {}
  for _, entry in ipairs(redis.call('LRANGE', SLOT.d, 0, most)) do
    local _, field = read_entry(entry)
    if not known[field] then
      fields[#fields + 1], known[field] = field, true
    end
  end
end

-- What the moment is foreseen from at which a refused ask fits, as flat pairs.
local function foresight()
  local fields, flat = {}, {}
  for index = 1, COUNT do
    local scope = SCOPES[index]
    open_windows(scope)
    add_slots(fields, scope.cap)
    add_slots(fields, scope.rate)
    add_slots(fields, scope.repay)
  end
  for field, meter in pairs(SLOT.targets) do
    if meter then
      fields[#fields + 1] = field
      add_slots(fields, meter.rate)
    end
  end
  add_leases(fields, 4 * FORESEEN)
  add_pairs(flat, fields)
  return flat
end

local function reply(now, verdict, hold, ceiling, expected, target, which, asked)
  local answers = (asked > 0 and ANSWERS[1] or 0) + (asked > 1 and ANSWERS[2] * 4 or 0)
  local said = { verdict, now, hold, ceiling, expected, target, which - 1, answers, SCOPES[1].packed }
  if COUNT > 1 then said[10] = SCOPES[2].packed end
  if verdict == CAP or verdict == RATE then said[9 + COUNT] = foresight() end
  return said
end

local function admit(keys, args)
  local lease_span, moment, wanted, first_hold, most, cap_need, primary, forced = struct.unpack(NUMBERS, args[2])
  local now, terms = load(keys, args, lease_span, moment)
  if not now then return false end
  local known = SLOT.lease and live(args[3])
  if known then
    save(now, lease_span, terms)
    return reply(now, known.kind, known.hold, known.ceiling, known.expected, known.target, 1, 0)
  end
  local verdict, ceiling, expected, target, which, asked = decide(now, args, wanted, most, cap_need, primary, forced)
  local hold = first_hold < ceiling and first_hold or ceiling
  if verdict <= OVERFLOW then open_lease(now, args, now + lease_span, verdict, ceiling, hold, expected, target) end
  save(now, lease_span, terms)
  return reply(now, verdict, hold, ceiling, expected, target, which, asked)
end

register('admit', admit)
