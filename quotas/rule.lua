--[[ The quota rule where the state lives: the same changes to the same books as in books.py and windows.py.

One library of functions, which Redis reads once (https://redis.io/docs/latest/develop/programmability/functions-intro/):
this file, then admit.lua, progress.lua, settle.lua, renew.lua, peek.lua, seed.lua, recall.lua and sidecars.lua, which
register the functions. Before it all stands the name of the library, and PREFIX: what the functions' names begin with.

keys     four, all of one account's slot:
           mark   string: when the slot was seeded, and what makes it unique. Without it all else is void
           w      hash: all books, see below
           d      list: when leases expire, in order of time. An entry is the moment's digits and the lease's field. Each time
                  that a lease is renewed it gets one more; the older ones say nothing any more. (The order holds while all
                  sidecars that share a Redis have the same lease span. If not, a lease may expire late, by as much as
                  they differ.)
           f      sorted set: field of an expired lease, of a scope, of a target -> when to see whether it can be forgotten
fields   of w; a scope is "k:<key>" or "t:<team>":
           *                what is said of the slot itself (SLOT_RECORD)
           <scope>          its holds and windows (RECORD)
           l:<lease>        a lease (LEASE)
           o:<n>:<scope><target>   what the key, n bytes, used of a target's own rate (METER)
           p:<scope>        when it was last charged what it had used elsewhere, a double
           <window>:<n>     the slots 16n to 16n + 15 of a window, a msgpack array of tokens. The windows are "h<scope>" the
                            cap, "m<scope>" the rate, "r<scope>" the repay span, and "m<target's field>" a target's rate
args     1. the terms of each scope (TERMS)   2. numbers, as doubles: a lease's span, the moment (0 but in tests), and those
         that each function's header names   3. a lease's field   4. and on: one or two scopes, the key's first; then what
         the function's header names
Units    tokens; moments and spans in microseconds, all whole numbers below 2^53 and so exact in Lua's doubles
Time     Redis' own, never before the newest moment a scope has seen
Expiry   every key gets one: when nothing in it can matter any more. It is garbage collection, never logic.
Tables   those that every call needs are made once and filled anew: garbage would cost more than the rule. For the same
         reason x - x % 1 stands for floor(x), and comparisons for min and max.
]]

local CHUNK = 16
local BATCH = 100
local FORESEEN = 256
local REMEMBER = 600e6
local MARK = 3600e6
local MINUTE = 60e6
local SLACK = 30e6 -- a key's expiry is set so much too late, and then left alone for as long
local HAIR = 1000
local NEVER = 2 ^ 52
local BASE, BURST, OVERFLOW, PARALLEL, CAP, RATE = 1, 2, 3, 4, 5, 6 -- verdicts
local NO = 3 -- a scope's own answer: BASE, BURST or NO

local SLOT_RECORD = '<dddd'
local RECORD = '<dddddc160'
local SUMS = '<dddddc64dddddd' -- what RECORD begins with
local WINDOWS = '<c64dddddddddddd' -- what it ends with
local LAYOUT = '<dddddddd'
local METER = '<ddddddddddd'
local LEASE = '<ddddddddddI4c0I4c0I4c0'
local TERMS = '<dddddddddddd'

-- ---- the slot: keys, what is read of w once, and what is to be written into it ----------------------------------------------

local SLOT = { writes = {} }

-- `fetched`: whether more was read than what every call reads, and may have to be written.
local function clear_slot(keys)
  SLOT.mark, SLOT.w, SLOT.d, SLOT.f = keys[1], keys[2], keys[3], keys[4]
  SLOT.write_count, SLOT.changed, SLOT.d_is_new, SLOT.f_is_new = 0, false, false, false
  if SLOT.fetched ~= false then
    SLOT.chunks, SLOT.charged, SLOT.leases, SLOT.targets, SLOT.others = {}, {}, {}, {}, {}
    SLOT.fetched = false
  end
end

-- `due`: when the first lease expires; `forgets`: when something may be forgotten; `kept`, `marked`: until when the keys, and
-- the mark, are kept.
local function fill_slot(due, forgets, kept, marked)
  SLOT.due, SLOT.forgets, SLOT.kept, SLOT.marked = due, forgets, kept, marked
end

local function put(field, value)
  local writes, count = SLOT.writes, SLOT.write_count
  writes[count + 1], writes[count + 2] = field, value
  SLOT.write_count = count + 2
end

local function flush()
  if SLOT.write_count > 0 then redis.call('HSET', SLOT.w, unpack(SLOT.writes, 1, SLOT.write_count)) end
  SLOT.write_count = 0
end

local function drop(fields)
  if #fields > 0 then redis.call('HDEL', SLOT.w, unpack(fields)) end
end

-- That something may be forgotten at a moment.
local function forget_at(field, moment)
  if redis.call('ZADD', SLOT.f, moment, field) == 1 then SLOT.f_is_new = true end
  if moment < SLOT.forgets then
    SLOT.forgets, SLOT.changed = moment, true
  end
end

-- ---- windows: running sums over slots -----------------------------------------------------------------------------------
--
-- One that is not kept has a span of 0. No slot before `first` counts; nothing was charged after `newest`. An empty one has
-- `first` at NEVER. `owner`: the scope or the target's meter, which has `moved` when a window changed.

local function chunk_of(index)
  local chunk = index / CHUNK
  return chunk - chunk % 1
end

-- The oldest slot that counts.
local function horizon_of(window, now)
  local horizon = (now - window.span) / window.slot
  return horizon - horizon % 1
end

local function read_chunk(field)
  local slots = SLOT.chunks[field]
  if slots == nil then
    local packed = redis.call('HGET', SLOT.w, field)
    slots = packed and cmsgpack.unpack(packed)
    SLOT.chunks[field], SLOT.fetched = slots, true
  end
  return slots
end

local function add_chunks(fields, id, first, last)
  for chunk = first, last do
    fields[#fields + 1] = id .. chunk
  end
end

-- The fields of all slots that hold something.
local function add_slots(fields, window)
  add_chunks(fields, window.id, chunk_of(window.first), chunk_of(window.newest))
end

local function drop_chunks(id, first, last)
  local fields = {}
  add_chunks(fields, id, first, last)
  for _, field in ipairs(fields) do
    SLOT.chunks[field], SLOT.charged[field] = false, nil
  end
  drop(fields)
end

local function empty(window)
  drop_chunks(window.id, chunk_of(window.first), chunk_of(window.newest))
  window.total, window.first, window.newest = 0, NEVER, -1
end

-- Takes the slots from `first` to before `horizon` off the sum; the next that may hold something.
local function take_off(window, horizon)
  for chunk = chunk_of(window.first), chunk_of(window.newest) do
    local slots, before = read_chunk(window.id .. chunk), chunk * CHUNK - 1
    for place = 1, slots and CHUNK or 0 do
      local index = before + place
      if index >= horizon and slots[place] ~= 0 then return index end
      if index >= window.first and index < horizon then window.total = window.total - slots[place] end
    end
    if before + CHUNK >= horizon then return before + CHUNK + 1 end
  end
  return horizon
end

-- Forgets the slots of which all is older than the span.
local function slide(owner, window, now)
  local horizon = horizon_of(window, now)
  if horizon <= window.first then return end
  owner.moved = true
  if window.newest < horizon then return empty(window) end
  local first = take_off(window, horizon)
  drop_chunks(window.id, chunk_of(window.first), chunk_of(first) - 1)
  window.first = first
end

-- Charges tokens at a moment; what slid out already counts no more. A correction may be negative.
local function add(owner, window, at, tokens, now)
  local index = at / window.slot
  index = index - index % 1
  if tokens == 0 or index < horizon_of(window, now) then return end
  local field = window.id .. chunk_of(index)
  local slots = read_chunk(field) or { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
  local place = index % CHUNK + 1
  slots[place] = slots[place] + tokens
  SLOT.chunks[field], SLOT.charged[field], owner.moved = slots, true, true
  window.total = window.total + tokens
  if index > window.newest then window.newest = index end
  if index < window.first then window.first = index end
end

-- Counts the same charges in another layout, each at the latest moment it can have had.
local function resize(owner, window, span, slot, now)
  local old_slot, first, charges = window.slot, window.first, {}
  for chunk = chunk_of(first), chunk_of(window.newest) do
    charges[chunk] = read_chunk(window.id .. chunk) or nil
  end
  empty(window)
  window.span, window.slot = span, slot
  for chunk, slots in pairs(charges) do
    for place, tokens in ipairs(slots) do
      local index = chunk * CHUNK + place - 1
      if index >= first then add(owner, window, math.min((index + 1) * old_slot - 1, now), tokens, now) end
    end
  end
end

-- Brings the window into the wanted layout (a span of 0: none), and to now. One whose limit was taken away is still kept,
-- for its return.
local function lay_out(owner, window, span, slot, now)
  if span > 0 and (window.span ~= span or window.slot ~= slot) then
    if window.span > 0 then resize(owner, window, span, slot, now) end
    window.span, window.slot, owner.moved = span, slot, true
  end
  if window.span > 0 then slide(owner, window, now) end
end

-- When the first of what is charged slides out, and when the last.
local function first_leaves(window)
  return window.first == NEVER and NEVER or (window.first + 1) * window.slot + window.span
end

local function last_leaves(window)
  return (window.newest + 1) * window.slot + window.span
end

-- ---- meters: one route's rate, repay span, debt, holds and burst ------------------------------------------------------

-- What is owed at a moment of a debt that was `debt` at `since`. Only whole tokens count as paid back, and a hair late.
local function owed(debt, since, pace, per, now)
  local elapsed = now - since - HAIR
  if debt == 0 or elapsed <= 0 then return debt end
  local paid = elapsed * pace / per
  local left = debt - (paid - paid % 1)
  return left > 0 and left or 0
end

local function charge_debt(meter, now, tokens)
  if owed(meter.debt, meter.since, meter.pace, meter.per, now) == 0 then
    meter.debt, meter.since = tokens, now
    return
  end
  local periods = math.floor(math.max(0, now - meter.since - HAIR) / meter.per) -- whole periods are paid off exactly
  meter.debt = meter.debt + tokens - periods * meter.pace
  meter.since = meter.since + periods * meter.per
end

-- The moment by which all debt is paid back.
local function paid_at(meter)
  if meter.debt == 0 or meter.pace == 0 then return 0 end
  return meter.since + HAIR + math.ceil(meter.debt * meter.per / meter.pace)
end

local function tick_meter(meter, terms, now)
  lay_out(meter, meter.rate, terms.rate_span, terms.rate_slot, now)
  lay_out(meter, meter.repay, terms.repay_span, terms.repay_slot, now)
  -- What is owed now is paid back at another pace from now on.
  if terms.rate_span > 0 and (meter.pace ~= terms.rate or meter.per ~= terms.per) then
    meter.debt = owed(meter.debt, meter.since, meter.pace, meter.per, now)
    meter.since, meter.pace, meter.per, meter.moved = now, terms.rate, terms.per, true
  end
end

local function charge_meter(meter, now, tokens)
  if tokens == 0 then return end
  if meter.rate.span > 0 then
    add(meter, meter.rate, now, tokens, now)
    charge_debt(meter, now, tokens)
  end
  if meter.repay.span > 0 then add(meter, meter.repay, now, tokens, now) end
end

local function burst_open(opened, terms, now)
  return opened >= 0 and opened <= now and now < opened + terms.burst
end

-- What a meter says to `more` tokens, held ones among them. `debt` is what is owed now, `opened` when its burst was opened.
local function answer(terms, now, more, debt, rate_total, repay_total, opened)
  if terms.rate_span == 0 then return BASE end
  if debt + more > terms.room then return NO end
  local repay_span = terms.repay_span
  if repay_span > 0 and repay_total + more > terms.repay then return NO end
  if rate_total + more <= terms.rate then return BASE end
  if repay_span == 0 then return NO end
  if opened < 0 or now >= opened + repay_span or burst_open(opened, terms, now) then return BURST end
  return NO
end

-- ---- targets: what the key used of an overflow's own rate -----------------------------------------------------------------

local function target_field(scope, target)
  return 'o:' .. #scope.id .. ':' .. scope.id .. target
end

local function meter_of_target(field, held, opened, debt, since, pace, per, span, slot, total, first, newest)
  return {
    held = held,
    opened = opened,
    debt = debt,
    since = since,
    pace = pace,
    per = per,
    rate = { id = 'm' .. field .. ':', span = span, slot = slot, total = total, first = first, newest = newest },
    repay = { span = 0 },
  }
end

-- A target's meter, or false.
local function read_target(field)
  local meter = SLOT.targets[field]
  if meter == nil then
    local packed = redis.call('HGET', SLOT.w, field)
    meter = packed and meter_of_target(field, struct.unpack(METER, packed))
    SLOT.targets[field], SLOT.fetched = meter, true
  end
  return meter
end

local function open_target(field, now)
  local meter = read_target(field)
  if not meter then
    meter = meter_of_target(field, 0, -1, 0, 0, 0, 1, 0, 0, 0, NEVER, -1)
    meter.moved, SLOT.targets[field] = true, meter
    forget_at(field, now + REMEMBER)
  end
  return meter
end

local function packed_meter(meter)
  local rate = meter.rate
  return struct.pack(
    METER, meter.held, meter.opened, meter.debt, meter.since, meter.pace, meter.per,
    rate.span, rate.slot, rate.total, rate.first, rate.newest
  )
end

-- ---- scopes: holds, and windows when they are wanted ----------------------------------------------------------------------

local SCOPES = {} -- the scopes of the call, from 1 to COUNT
local COUNT = 0

-- A scope is the primary's meter, too.
local function new_scope()
  return { cap = {}, rate = {}, repay = {} }
end

local function fill_layout(scope, cap_span, cap_slot, rate_span, rate_slot, repay_span, repay_slot, pace, per)
  local id, cap, rate, repay = scope.id, scope.cap, scope.rate, scope.repay
  cap.id, rate.id, repay.id = 'h' .. id .. ':', 'm' .. id .. ':', 'r' .. id .. ':'
  cap.span, cap.slot, rate.span, rate.slot, repay.span, repay.slot =
    cap_span, cap_slot, rate_span, rate_slot, repay_span, repay_slot
  scope.pace, scope.per = pace, per
end

local function fill_windows(
  scope, layout, debt, since, _, cap_total, rate_total, repay_total,
  cap_first, cap_newest, rate_first, rate_newest, repay_first, repay_newest
)
  fill_layout(scope, struct.unpack(LAYOUT, layout))
  scope.debt, scope.since = debt, since
  local cap, rate, repay = scope.cap, scope.rate, scope.repay
  cap.total, cap.first, cap.newest = cap_total, cap_first, cap_newest
  rate.total, rate.first, rate.newest = rate_total, rate_first, rate_newest
  repay.total, repay.first, repay.newest = repay_total, repay_first, repay_newest
end

local function packed_layout(cap_span, cap_slot, rate_span, rate_slot, repay_span, repay_slot, pace, per)
  return struct.pack(LAYOUT, cap_span, cap_slot, rate_span, rate_slot, repay_span, repay_slot, pace, per)
end

local EMPTY

local function empty_record()
  if not EMPTY then
    local layout = packed_layout(0, 0, 0, 0, 0, 0, 0, 1)
    local windows = struct.pack(WINDOWS, layout, 0, 0, NEVER, 0, 0, 0, NEVER, -1, NEVER, -1, NEVER, -1)
    EMPTY = struct.pack(RECORD, 0, 0, 0, 0, -1, windows)
  end
  return EMPTY
end

-- Opens the windows, so that they can be changed.
local function open_windows(scope)
  if scope.is_open then return end
  fill_windows(scope, struct.unpack(WINDOWS, scope.packed, 41))
  scope.is_open = true
end

local function packed_windows(scope)
  local cap, rate, repay = scope.cap, scope.rate, scope.repay
  local layout = packed_layout(cap.span, cap.slot, rate.span, rate.slot, repay.span, repay.slot, scope.pace, scope.per)
  local stays = math.min(first_leaves(cap), first_leaves(rate), first_leaves(repay))
  return struct.pack(
    WINDOWS, layout, scope.debt, scope.since, stays, cap.total, rate.total, repay.total,
    cap.first, cap.newest, rate.first, rate.newest, repay.first, repay.newest
  )
end

local function packed_scope(scope)
  local windows = scope.moved and packed_windows(scope) or string.sub(scope.packed, 41)
  return struct.pack(RECORD, scope.seen, scope.running, scope.cap_held, scope.held, scope.opened, windows)
end

-- What the rule asks of the windows, after they changed.
local function sum_up(scope, now)
  scope.cap_total, scope.rate_total, scope.repay_total = scope.cap.total, scope.rate.total, scope.repay.total
  scope.owed = owed(scope.debt, scope.since, scope.pace, scope.per, now)
end

-- A scope's holds, and what the rule asks of its windows. `stays`: before that moment nothing slides out of them.
local function load_scope(scope, id, terms, packed)
  scope.id, scope.terms, scope.is_new, scope.packed = id, terms, not packed, packed or empty_record()
  scope.changed, scope.moved, scope.is_open = not packed, false, false
  scope.seen, scope.running, scope.cap_held, scope.held, scope.opened, scope.layout, scope.debt, scope.since, scope.stays,
    scope.cap_total, scope.rate_total, scope.repay_total = struct.unpack(SUMS, scope.packed)
end

-- A scope by its field: one of the call's, or another of the slot.
local function scope_of(id)
  for index = 1, COUNT do
    if SCOPES[index].id == id then return SCOPES[index] end
  end
  local scope = SLOT.others[id]
  if not scope then
    scope = new_scope()
    load_scope(scope, id, nil, redis.call('HGET', SLOT.w, id))
    SLOT.others[id], SLOT.fetched = scope, true
  end
  return scope
end

-- Brings a scope to the moment. Mostly its windows lie as the terms want them, and nothing slides out.
local function tick(scope, now)
  local terms = scope.terms
  scope.seen = now
  if scope.layout == terms.layout and now < scope.stays then
    scope.owed = scope.debt > 0 and owed(scope.debt, scope.since, terms.rate, terms.per, now) or 0
    return
  end
  open_windows(scope)
  lay_out(scope, scope.cap, terms.cap_span, terms.cap_slot, now)
  tick_meter(scope, terms, now)
  sum_up(scope, now)
end

-- Until when anything of a scope can matter to an answer: the longest window or the memory of expired leases, behind the last
-- moment that something may be charged; or until all debt is paid back.
local function keeps(scope, last)
  open_windows(scope)
  local cap, rate, repay = scope.cap, scope.rate, scope.repay
  local longest = math.max(REMEMBER, cap.span + cap.slot, rate.span + rate.slot, repay.span + repay.slot)
  return math.min(NEVER, math.max(last + longest, paid_at(scope))) + 1e6
end

-- ---- leases: each is held in one or two scopes ------------------------------------------------------------------------------

local function unpacked_lease(packed)
  local kind, opened, expires, ceiling, hold, expected, rate_hold, cap_hold, consumed, booked, first, second, target =
    struct.unpack(LEASE, packed)
  return {
    kind = kind,
    opened = opened,
    expires = expires,
    ceiling = ceiling,
    hold = hold,
    expected = expected,
    rate_hold = rate_hold,
    cap_hold = cap_hold,
    consumed = consumed,
    booked = booked,
    first = first,
    second = second,
    target = target,
  }
end

-- A lease, or false. That which the call is about was read with the scopes.
local function read_lease(field)
  local lease = SLOT.leases[field]
  if lease == nil then
    local packed = SLOT.lease
    if field ~= SLOT.lease_field then packed = redis.call('HGET', SLOT.w, field) end
    lease = packed and unpacked_lease(packed)
    SLOT.leases[field], SLOT.fetched = lease, true
  end
  return lease
end

-- One that runs; an expired one has `booked`, what its cap hold was booked with, from 0 on.
local function live(field)
  local lease = read_lease(field)
  return lease and lease.booked < 0 and lease or nil
end

local function write_lease(field, lease)
  local packed = struct.pack(
    LEASE, lease.kind, lease.opened, lease.expires, lease.ceiling, lease.hold, lease.expected, lease.rate_hold,
    lease.cap_hold, lease.consumed, lease.booked, #lease.first, lease.first, #lease.second, lease.second,
    #lease.target, lease.target
  )
  put(field, packed)
end

local function drop_lease(field)
  redis.call('HDEL', SLOT.w, field)
  SLOT.leases[field], SLOT.fetched = false, true
end

-- Notes when a running lease expires.
local function call_back(field, moment)
  if redis.call('RPUSH', SLOT.d, string.format('%d', moment) .. field) == 1 then SLOT.d_is_new = true end
  if moment < SLOT.due then
    SLOT.due, SLOT.changed = moment, true
  end
end

-- The scopes of a lease, with their windows open; the second may be nothing.
local function scopes_of(lease)
  local first, second = scope_of(lease.first), lease.second ~= '' and scope_of(lease.second) or nil
  open_windows(first)
  first.changed = true
  if second then
    open_windows(second)
    second.changed = true
  end
  return first, second
end

-- The meters of the lease's route: on the primary those of its scopes; else that of a target with a rate.
local function meters_of(lease, first, second)
  if lease.kind ~= OVERFLOW then return first, second end
  local meter = lease.target ~= '' and read_target(target_field(first, lease.target)) or nil
  if meter then meter.moved = true end
  return meter
end

local function release(lease, first, second, rate, cap)
  local one, other = meters_of(lease, first, second)
  if one then one.held = one.held - rate end
  if other then other.held = other.held - rate end
  first.cap_held = first.cap_held - cap
  if second then second.cap_held = second.cap_held - cap end
  lease.rate_hold = lease.rate_hold - rate
  lease.cap_hold = lease.cap_hold - cap
end

local function charge_cap(scope, at, tokens, now)
  if scope and scope.cap.span > 0 then add(scope, scope.cap, at, tokens, now) end
end

local function charge_rate(lease, first, second, more, now)
  local one, other = meters_of(lease, first, second)
  if one then charge_meter(one, now, more) end
  if other then charge_meter(other, now, more) end
end

-- Charges what `consumed`, in all, adds to what was known, and lowers the holds by as much.
local function charge(lease, first, second, consumed, now)
  local more = math.max(0, consumed - lease.consumed)
  lease.consumed = lease.consumed + more
  charge_cap(first, now, more, now)
  charge_cap(second, now, more, now)
  charge_rate(lease, first, second, more, now)
  release(lease, first, second, math.min(more, lease.rate_hold), math.min(more, lease.cap_hold))
end

-- A lease runs no more: what it still holds is given back.
local function stop(lease, first, second)
  release(lease, first, second, lease.rate_hold, lease.cap_hold)
  first.running = first.running - 1
  if second then second.running = second.running - 1 end
end

-- A silent sidecar's lease ends: its cap hold becomes a charge at that moment, its rate hold is given back.
local function expire(field, lease, now)
  local first, second = scopes_of(lease)
  lease.booked = lease.cap_hold
  charge_cap(first, lease.expires, lease.booked, now)
  charge_cap(second, lease.expires, lease.booked, now)
  stop(lease, first, second)
  write_lease(field, lease)
  forget_at(field, lease.expires + REMEMBER + 1)
end

local function read_entry(entry)
  local moment, field = string.match(entry, '^(%d+)(.*)$')
  return tonumber(moment), field
end

local function expire_due(now)
  SLOT.changed = true
  repeat
    local entries, count = redis.call('LRANGE', SLOT.d, 0, BATCH - 1), 0
    SLOT.due = NEVER
    for _, entry in ipairs(entries) do
      local moment, field = read_entry(entry)
      if moment > now then
        SLOT.due = moment
        break
      end
      local lease = live(field)
      if lease and lease.expires <= now then expire(field, lease, now) end
      count = count + 1
    end
    if count > 0 then redis.call('LTRIM', SLOT.d, count, -1) end
    flush()
  until count < BATCH
end

-- ---- forgetting -----------------------------------------------------------------------------------------------------------

local function forget_scope(field, now, lease_span)
  local scope = scope_of(field)
  local keep = keeps(scope, scope.seen + lease_span)
  if keep > now then return keep end
  local fields = { field }
  add_slots(fields, scope.cap)
  add_slots(fields, scope.rate)
  add_slots(fields, scope.repay)
  drop(fields)
  SLOT.others[field] = nil
end

local function forget_target(field, now)
  local meter = read_target(field)
  if not meter then return end
  local keep = math.max(last_leaves(meter.rate), paid_at(meter), meter.held > 0 and now + REMEMBER or 0)
  if keep > now then return keep end
  local fields = { field }
  add_slots(fields, meter.rate)
  drop(fields)
  SLOT.targets[field] = nil
end

-- When to see again whether it can be forgotten, or nothing: it is.
local function forget(field, now, lease_span)
  local kind = string.sub(field, 1, 2)
  if kind == 'l:' then return drop_lease(field) end
  if kind == 'p:' then return drop({ field }) end
  if kind == 'o:' then return forget_target(field, now) end
  return forget_scope(field, now, lease_span)
end

local function forget_due(now, lease_span)
  local due
  repeat
    due = redis.call('ZRANGEBYSCORE', SLOT.f, '-inf', now, 'LIMIT', 0, BATCH)
    for _, field in ipairs(due) do
      local again = forget(field, now, lease_span)
      if again then
        redis.call('ZADD', SLOT.f, again, field)
      else
        redis.call('ZREM', SLOT.f, field)
      end
    end
  until #due < BATCH
  local first = redis.call('ZRANGE', SLOT.f, 0, 0, 'WITHSCORES')
  SLOT.forgets, SLOT.changed = first[2] and tonumber(first[2]) or NEVER, true
end

-- ---- reading --------------------------------------------------------------------------------------------------------------

-- A limit that is absent has a span of 0, an absent parallel limit is below 0.
local function new_terms(
  rate, rate_span, rate_slot, repay, repay_span, repay_slot, cap, cap_span, cap_slot, burst, room, parallel
)
  local per = rate_span > 0 and rate_span or 1
  return {
    rate = rate,
    rate_span = rate_span,
    rate_slot = rate_slot,
    per = per,
    repay = repay,
    repay_span = repay_span,
    repay_slot = repay_slot,
    cap = cap,
    cap_span = cap_span,
    cap_slot = cap_slot,
    burst = burst,
    room = room,
    parallel = parallel,
    layout = packed_layout(cap_span, cap_slot, rate_span, rate_slot, repay_span, repay_slot, rate, per),
    keep = math.max(REMEMBER, cap_span + cap_slot, rate_span + rate_slot, repay_span + repay_slot) + 1e6,
    longest = math.max(cap_span, rate_span, repay_span),
  }
end

local TERMS_READ, TERMS_COUNT = {}, 0 -- most keys share the terms of few tiers

-- The terms of each scope, and the `longest` window, and how long to `keep` what is in it, of all of them.
local function read_terms(packed)
  local all = TERMS_READ[packed]
  if all then return all end
  if TERMS_COUNT >= 1000 then
    TERMS_READ, TERMS_COUNT = {}, 0
  end
  all = { longest = 0, keep = 0 }
  for index = 1, #packed / 96 do
    local terms = new_terms(struct.unpack(TERMS, packed, (index - 1) * 96 + 1))
    all[index] = terms
    all.longest, all.keep = math.max(all.longest, terms.longest), math.max(all.keep, terms.keep)
  end
  TERMS_READ[packed], TERMS_COUNT = all, TERMS_COUNT + 1
  return all
end

local function moment_of(time)
  return time[1] * 1e6 + time[2]
end

-- The call's scopes, brought to the same moment, which is never before one that was seen, and all terms. Nothing where the
-- slot has no mark.
local function load(keys, args, lease_span, moment)
  local mark = redis.call('GET', keys[1])
  if not mark then return nil end
  clear_slot(keys)
  local now = moment > 0 and moment or moment_of(redis.call('TIME'))
  local terms, field = read_terms(args[1]), args[3]
  COUNT = #terms
  local found = redis.call('HMGET', keys[2], '*', field, unpack(args, 4, 3 + COUNT))
  SLOT.lease_field, SLOT.lease = field, found[2]
  if found[1] then
    fill_slot(struct.unpack(SLOT_RECORD, found[1]))
  else
    fill_slot(NEVER, NEVER, 0, 0)
  end
  for index = 1, COUNT do
    local scope = SCOPES[index] or new_scope()
    SCOPES[index] = scope
    load_scope(scope, args[3 + index], terms[index], found[2 + index])
    if scope.seen > now then now = scope.seen end
  end
  for index = 1, COUNT do
    tick(SCOPES[index], now)
  end
  if SLOT.due > now and SLOT.forgets > now then return now, terms end
  if SLOT.due <= now then expire_due(now) end
  if SLOT.forgets <= now then forget_due(now, lease_span) end
  for index = 1, COUNT do
    if SCOPES[index].is_open then sum_up(SCOPES[index], now) end
  end
  return now, terms
end

local function cap_left(scope)
  if scope.terms.cap_span == 0 then return 1e15 end
  return scope.terms.cap - scope.cap_total - scope.cap_held
end

-- What the tightest of the caps leaves, and which it is.
local function tightest()
  local left, which = cap_left(SCOPES[1]), 1
  for index = 2, COUNT do
    local other = cap_left(SCOPES[index])
    if other < left then left, which = other, index end
  end
  return left, which
end

-- ---- writing ----------------------------------------------------------------------------------------------------------

local function put_scope(scope, now, lease_span)
  if scope.changed or scope.moved then
    scope.packed = packed_scope(scope)
    put(scope.id, scope.packed)
  end
  if scope.is_new then forget_at(scope.id, keeps(scope, now + lease_span)) end
end

local function put_targets()
  for field, meter in pairs(SLOT.targets) do
    if meter and meter.moved then put(field, packed_meter(meter)) end
  end
end

local function put_chunks()
  for field in pairs(SLOT.charged) do
    put(field, cmsgpack.pack(SLOT.chunks[field]))
  end
end

local function kept_for_others(now, lease_span)
  local kept = 0
  for _, scope in pairs(SLOT.others) do
    kept = math.max(kept, keeps(scope, now + lease_span))
  end
  for _, meter in pairs(SLOT.targets) do
    if meter then kept = math.max(kept, last_leaves(meter.rate), paid_at(meter)) end
  end
  return kept
end

-- Until when the keys must be kept: mostly no longer than they are.
local function kept_until(now, lease_span, keep)
  local kept = now + lease_span + keep
  for index = 1, COUNT do
    if SCOPES[index].moved then kept = math.max(kept, keeps(SCOPES[index], now + lease_span)) end
  end
  if SLOT.fetched then kept = math.max(kept, kept_for_others(now, lease_span)) end
  return kept < NEVER and kept or NEVER
end

local function expire_keys(now, later)
  local milliseconds = math.ceil((SLOT.kept - now) / 1000)
  if later then redis.call('PEXPIRE', SLOT.w, milliseconds) end
  if later or SLOT.d_is_new then redis.call('PEXPIRE', SLOT.d, milliseconds) end
  if later or SLOT.f_is_new then redis.call('PEXPIRE', SLOT.f, milliseconds) end
end

-- The mark outlives the longest window by an hour, less the minute between two times that its expiry is set.
local function expire_mark(now, longest)
  local marked = now + longest + MARK
  if marked - SLOT.marked < MINUTE then return end
  SLOT.marked, SLOT.changed = marked, true
  redis.call('PEXPIRE', SLOT.mark, math.ceil((math.max(marked, SLOT.kept) - now) / 1000), 'GT')
end

local function put_fetched(now, lease_span)
  for _, scope in pairs(SLOT.others) do
    put_scope(scope, now, lease_span)
  end
  put_targets()
  put_chunks()
end

-- Writes what changed.
local function save(now, lease_span, terms)
  for index = 1, COUNT do
    put_scope(SCOPES[index], now, lease_span)
  end
  if SLOT.fetched then put_fetched(now, lease_span) end
  local kept = kept_until(now, lease_span, terms.keep)
  local later = kept > SLOT.kept
  if later then
    SLOT.kept, SLOT.changed = kept + SLACK, true
  end
  expire_mark(now, terms.longest)
  if SLOT.changed then put('*', struct.pack(SLOT_RECORD, SLOT.due, SLOT.forgets, SLOT.kept, SLOT.marked)) end
  flush()
  if later or SLOT.d_is_new or SLOT.f_is_new then expire_keys(now, later) end
end

-- ---- registering --------------------------------------------------------------------------------------------------------

local function register(name, callback)
  redis.register_function(PREFIX .. name, callback)
end
