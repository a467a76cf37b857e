--[[ The quota rule where the state lives: the same changes to the same books as in books.py and windows.py.

Loaded in front of each of admit.lua, progress.lua, settle.lua and renew.lua.

KEYS     the slot's mark, then three a scope, the key's scope first, all in one hash slot:
           <slot>:mark  string: the mark. Books of another mark, or of none, are void
           <scope>:w  hash: "g" the mark they belong to, "s" the scope's books (msgpack, the fields of books.State), and the
                      windows' slots in chunks of sixteen: "<window>:<slot number // 16>" -> msgpack array of tokens
           <scope>:l  hash: lease -> msgpack, the fields of books.Lease
           <scope>:d  sorted set: lease -> when something is to be done with it: it expires, or is to be forgotten
ARGV[1]  msgpack map: lease = a lease's span, scopes = the terms of each scope (the fields of books.Terms, absent limits
         left out), now = the moment, only in tests; and what each script's header names
Units    tokens; moments and spans in microseconds, all whole numbers below 2^53 and so exact in Lua's doubles
Time     Redis' own, never before the newest moment a scope has seen
Expiry   every key written gets one: when nothing in it can matter any more. It is garbage collection, never logic.
]]

local CHUNK = 16
local REMEMBER = 600e6
local MARK = 3600e6
local HAIR = 1000
local NEVER = 2 ^ 52
local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min

local args = cmsgpack.unpack(ARGV[1])

local function text(number)
  return string.format('%.0f', number)
end

-- ---- windows: running sums over slots -------------------------------------------------------------------------------

local Chunks = {} -- reads and writes one window's slots

function Chunks.read(scope, id, chunk)
  local packed = redis.call('HGET', scope.w, id .. ':' .. text(chunk))
  return packed and cmsgpack.unpack(packed)
end

function Chunks.write(scope, id, chunk, slots)
  redis.call('HSET', scope.w, id .. ':' .. text(chunk), cmsgpack.pack(slots))
end

function Chunks.drop(scope, id, first, last)
  for chunk = first, last do
    redis.call('HDEL', scope.w, id .. ':' .. text(chunk))
  end
end

local function chunk_of(index)
  return floor(index / CHUNK)
end

local function slide(scope, id, window, now)
  local horizon = floor((now - window.span) / window.slot)
  if horizon <= window.oldest then return end
  if window.newest < horizon then
    if window.newest >= window.oldest then Chunks.drop(scope, id, chunk_of(window.oldest), chunk_of(window.newest)) end
    window.total = 0
  else
    local first, last = chunk_of(window.oldest), chunk_of(horizon - 1)
    for chunk = first, last do
      local slots = Chunks.read(scope, id, chunk)
      if slots then
        for index = max(window.oldest, chunk * CHUNK), min(horizon, (chunk + 1) * CHUNK) - 1 do
          window.total = window.total - slots[index - chunk * CHUNK + 1]
        end
      end
    end
    Chunks.drop(scope, id, first, chunk_of(horizon) - 1)
  end
  window.oldest = horizon
  scope.changed = true
end

local function add(scope, id, window, at, tokens)
  local index = floor(at / window.slot)
  if tokens == 0 or index < window.oldest then return end
  local chunk = chunk_of(index)
  local slots = Chunks.read(scope, id, chunk) or { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
  local place = index - chunk * CHUNK + 1
  slots[place] = slots[place] + tokens
  Chunks.write(scope, id, chunk, slots)
  window.total = window.total + tokens
  window.newest = max(window.newest, index)
end

-- Counts the same charges in another layout, each at the latest moment it can have had.
local function resize(scope, id, window, want, now)
  if window.span == want.span and window.slot == want.slot then return end
  local old = { slot = window.slot, oldest = window.oldest, newest = window.newest }
  local charges = {}
  if old.newest >= old.oldest then
    for chunk = chunk_of(old.oldest), chunk_of(old.newest) do
      charges[chunk] = Chunks.read(scope, id, chunk) or nil
    end
    Chunks.drop(scope, id, chunk_of(old.oldest), chunk_of(old.newest))
  end
  window.span, window.slot, window.total, window.newest = want.span, want.slot, 0, -1
  window.oldest = max(0, floor((now - want.span) / want.slot))
  for chunk, slots in pairs(charges) do
    for place, tokens in ipairs(slots) do
      local index = chunk * CHUNK + place - 1
      if index >= old.oldest then add(scope, id, window, min((index + 1) * old.slot - 1, now), tokens) end
    end
  end
  scope.changed = true
end

-- The window in the wanted layout, slid to now. One whose limit was taken away is still kept, for its return.
local function laid_out(scope, id, window, want, now)
  if not window then
    if not want then return nil end
    scope.changed = true
    local oldest = max(0, floor((now - want.span) / want.slot))
    return { span = want.span, slot = want.slot, total = 0, oldest = oldest, newest = -1 }
  end
  if want then resize(scope, id, window, want, now) end
  slide(scope, id, window, now)
  return window
end

-- ---- debt -----------------------------------------------------------------------------------------------------------

local function owed(debt, now)
  local elapsed = max(0, now - debt.since - HAIR)
  return max(0, debt.tokens - floor(elapsed * debt.pace / debt.per))
end

local function charge_debt(debt, now, tokens)
  if owed(debt, now) == 0 then
    debt.tokens, debt.since = tokens, now
    return
  end
  local periods = floor(max(0, now - debt.since - HAIR) / debt.per) -- whole periods are paid off exactly
  debt.tokens = debt.tokens + tokens - periods * debt.pace
  debt.since = debt.since + periods * debt.per
end

-- What is owed now is paid back at another pace from now on.
local function change_pace(scope, debt, pace, per, now)
  if debt.pace == pace and debt.per == per then return end
  debt.tokens, debt.since, debt.pace, debt.per = owed(debt, now), now, pace, per
  scope.changed = true
end

-- ---- meters: one route's rate, repay span, debt, holds and burst ------------------------------------------------------

local function fresh_meter()
  return { held = 0, opened = -1, debt = { tokens = 0, since = 0, pace = 0, per = 1 } }
end

-- A meter's windows are "m" and "r" for the primary, with "/<target>" behind for a target's own.
local function tick_meter(scope, suffix, meter, terms, now)
  meter.rate = laid_out(scope, 'm' .. suffix, meter.rate, terms.rate, now)
  meter.repay = laid_out(scope, 'r' .. suffix, meter.repay, terms.repay, now)
  if terms.rate then change_pace(scope, meter.debt, terms.rate.tokens, terms.rate.span, now) end
end

local function charge_meter(scope, suffix, meter, now, tokens)
  if tokens == 0 then return end
  if meter.rate then
    add(scope, 'm' .. suffix, meter.rate, now, tokens)
    charge_debt(meter.debt, now, tokens)
  end
  if meter.repay then add(scope, 'r' .. suffix, meter.repay, now, tokens) end
end

local function burst_open(meter, terms, now)
  return meter.opened >= 0 and meter.opened <= now and now < meter.opened + terms.burst
end

local function burst_may_open(meter, terms, now)
  return meter.opened < 0 or now >= meter.opened + terms.repay.span
end

local function answer(meter, terms, now, expected)
  if not terms.rate then return 'base' end
  local more = meter.held + expected
  if owed(meter.debt, now) + more > terms.room then return 'no' end
  if terms.repay and meter.repay.total + more > terms.repay.tokens then return 'no' end
  if meter.rate.total + more <= terms.rate.tokens then return 'base' end
  if terms.repay and (burst_open(meter, terms, now) or burst_may_open(meter, terms, now)) then return 'burst' end
  return 'no'
end

-- ---- leases ---------------------------------------------------------------------------------------------------------

local function read_lease(scope, name)
  local packed = redis.call('HGET', scope.l, name)
  return packed and cmsgpack.unpack(packed)
end

local function live(scope, name)
  local lease = read_lease(scope, name)
  return lease and not lease.booked and lease or nil
end

local function write_lease(scope, name, lease)
  redis.call('HSET', scope.l, name, cmsgpack.pack(lease))
  scope.changed = true
end

local function drop_lease(scope, name)
  redis.call('HDEL', scope.l, name)
  redis.call('ZREM', scope.d, name)
  scope.changed = true
end

local function call_back(scope, name, moment)
  redis.call('ZADD', scope.d, text(moment), name)
end

-- The books of the lease's route and the ending of their windows' names; none for a target without a rate.
local function meter_of(scope, lease)
  if lease.kind ~= 'overflow' then return scope.books.primary, '' end
  return scope.books.targets[lease.target or ''], '/' .. (lease.target or '')
end

local function release(scope, lease, rate, cap)
  local meter = meter_of(scope, lease)
  if meter then meter.held = meter.held - rate end
  lease.rate_hold = lease.rate_hold - rate
  lease.cap_hold = lease.cap_hold - cap
  scope.books.cap_held = scope.books.cap_held - cap
end

-- Charges what `consumed`, in all, adds to what was known, and lowers the holds by as much.
local function charge(scope, lease, consumed, now)
  local more = max(0, consumed - lease.consumed)
  lease.consumed = lease.consumed + more
  if scope.books.cap then add(scope, 'h', scope.books.cap, now, more) end
  local meter, suffix = meter_of(scope, lease)
  if meter then charge_meter(scope, suffix, meter, now, more) end
  release(scope, lease, min(more, lease.rate_hold), min(more, lease.cap_hold))
end

-- A silent sidecar's lease ends: its cap hold becomes a charge at that moment, its rate hold is given back.
local function expire(scope, name, lease)
  lease.booked = lease.cap_hold
  if scope.books.cap then add(scope, 'h', scope.books.cap, lease.expires, lease.booked) end
  release(scope, lease, lease.rate_hold, lease.cap_hold)
  scope.books.running = scope.books.running - 1
  write_lease(scope, name, lease)
  call_back(scope, name, lease.expires + REMEMBER + 1)
end

local function run_due(scope, now)
  repeat
    local names = redis.call('ZRANGEBYSCORE', scope.d, '-inf', text(now), 'LIMIT', 0, 100)
    for _, name in ipairs(names) do
      local lease = read_lease(scope, name)
      if lease and not lease.booked then expire(scope, name, lease) else drop_lease(scope, name) end
    end
  until #names == 0
end

-- ---- scopes ---------------------------------------------------------------------------------------------------------

local mark = redis.call('GET', KEYS[1])

local function load_scope(index)
  local scope = { w = KEYS[3 * index - 1], l = KEYS[3 * index], d = KEYS[3 * index + 1], terms = args.scopes[index] }
  local found = redis.call('HMGET', scope.w, 'g', 's')
  if found[1] == mark then
    scope.books = cmsgpack.unpack(found[2])
  else
    redis.call('DEL', scope.w, scope.l, scope.d)
    redis.call('HSET', scope.w, 'g', mark)
    scope.books = { seen = 0, cap_held = 0, running = 0, primary = fresh_meter() }
    scope.changed = true
  end
  scope.books.targets = scope.books.targets or {}
  return scope
end

local function tick(scope, now)
  local books = scope.books
  books.seen = now
  books.cap = laid_out(scope, 'h', books.cap, scope.terms.cap, now)
  tick_meter(scope, '', books.primary, scope.terms, now)
  run_due(scope, now)
end

-- Every scope, brought to the same moment, which is never before one that was seen. Only where the slot has its mark.
local function load_scopes()
  local now = args.now
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1e6 + time[2]
  end
  local scopes = {}
  for index in ipairs(args.scopes) do
    scopes[index] = load_scope(index)
    now = max(now, scopes[index].books.seen)
  end
  for _, scope in ipairs(scopes) do
    tick(scope, now)
  end
  return scopes, now
end

local function cap_left(scope)
  if not scope.terms.cap then return 1e15 end
  return scope.terms.cap.tokens - scope.books.cap.total - scope.books.cap_held
end

local function tightest(scopes)
  local left, which = cap_left(scopes[1]), 1
  for index = 2, #scopes do
    local other = cap_left(scopes[index])
    if other < left then left, which = other, index end
  end
  return left, which
end

-- How long, in milliseconds, anything here can matter to an answer: the longest window or the memory of expired leases,
-- behind a lease's span, or until all debt is paid back.
local function keep_ms(books, now)
  local longest, debts = REMEMBER, 0
  local function span(window)
    if window then longest = max(longest, window.span + window.slot) end
  end
  local function meter(each)
    span(each.rate)
    span(each.repay)
    if each.debt.pace > 0 then
      debts = max(debts, each.debt.since + HAIR + ceil(each.debt.tokens * each.debt.per / each.debt.pace) - now)
    end
  end
  span(books.cap)
  meter(books.primary)
  for _, each in pairs(books.targets) do
    meter(each)
  end
  return ceil((min(NEVER, max(args.lease + longest, debts)) + 1e6) / 1000)
end

-- The mark outlives the longest window by an hour, and the books.
local function mark_ms(terms)
  local longest = 0
  for _, name in ipairs({ 'rate', 'repay', 'cap' }) do
    longest = terms[name] and max(longest, terms[name].span) or longest
  end
  return ceil((longest + MARK) / 1000)
end

-- Writes what changed; returns the books, packed.
local function save(scope, now)
  local keep_ms = keep_ms(scope.books, now)
  local keep = text(keep_ms)
  if not next(scope.books.targets) then scope.books.targets = nil end -- msgpack would make an empty map an array
  local packed = cmsgpack.pack(scope.books)
  if not scope.changed then return packed end
  redis.call('HSET', scope.w, 's', packed)
  redis.call('PEXPIRE', scope.w, keep)
  redis.call('PEXPIRE', scope.l, keep)
  redis.call('PEXPIRE', scope.d, keep)
  redis.call('PEXPIRE', KEYS[1], text(max(keep_ms, mark_ms(scope.terms))), 'GT')
  return packed
end
