--[[ One admission: all limits of all scopes, all or none. Behind rule.lua, which says KEYS, ARGV and units.

ARGV[1]  also: key (the key's name), ask = the fields of store.Ask, with each target's rate as its terms
Reply    nothing where the slot has no mark, else
         1. msgpack: now, and the fields of decision.Decision (`scope` is an index from 0)
         2. per scope: its books, msgpack
         3. after a refusal also, per scope: its hash :w as flat pairs, and the leases first to end as flat pairs
]]

local FORESEEN = 256

local function target_answer(scope, target, now, expected)
  if not target.terms then return 'base' end
  local meter = scope.books.targets[target.name] or fresh_meter()
  scope.books.targets[target.name] = meter
  tick_meter(scope, '/' .. target.name, meter, target.terms, now)
  return answer(meter, target.terms, now, expected)
end

local function granted(kind, ask, ceiling, target, answers)
  return {
    kind = kind,
    hold = min(ask.first_hold, ceiling),
    ceiling = ceiling,
    expected = min(ask.expected, ceiling),
    target = target,
    answers = answers,
  }
end

local function ask_primary(scopes, expected, now)
  local answers, verdict, first_no = {}, 'base', nil
  for index, scope in ipairs(scopes) do
    local said = answer(scope.books.primary, scope.terms, now, expected)
    answers[index] = said
    if said == 'no' then
      first_no = first_no or index
    elseif said == 'burst' then
      verdict = 'burst'
    end
  end
  return answers, verdict, first_no
end

local function decide(scopes, ask, now)
  if ask.forced then return granted(ask.primary and 'base' or 'overflow', ask, ask.ceiling, nil, {}) end
  for index, scope in ipairs(scopes) do
    if scope.terms.parallel and scope.books.running >= scope.terms.parallel then
      return { kind = 'parallel', scope = index - 1 }
    end
  end
  local left, which = tightest(scopes)
  if left < ask.cap_need then return { kind = 'cap', scope = which - 1 } end
  local ceiling = min(ask.ceiling, left)
  local expected = min(ask.expected, ceiling)
  local answers, verdict, first_no = {}, nil, 1
  if ask.primary then
    answers, verdict, first_no = ask_primary(scopes, expected, now)
    if not first_no then return granted(verdict, ask, ceiling, nil, answers) end
  end
  for _, target in ipairs(ask.targets) do
    if target_answer(scopes[1], target, now, expected) == 'base' then
      return granted('overflow', ask, ceiling, target.name, answers)
    end
  end
  return { kind = 'rate', expected = expected, scope = first_no - 1, answers = answers }
end

local function open_lease(scope, ask, decision, said, now)
  local lease = {
    key = args.key,
    kind = decision.kind,
    target = decision.target,
    opened = now,
    expires = now + args.lease,
    ceiling = decision.ceiling,
    hold = decision.hold,
    expected = decision.expected,
    rate_hold = decision.expected,
    cap_hold = decision.hold,
    consumed = 0,
  }
  local books, meter = scope.books, meter_of(scope, lease)
  if meter then meter.held = meter.held + lease.rate_hold else lease.rate_hold = 0 end
  books.running = books.running + 1
  books.cap_held = books.cap_held + lease.cap_hold
  if said == 'burst' and decision.kind == 'burst' and not burst_open(books.primary, scope.terms, now) then
    books.primary.opened = now
  end
  write_lease(scope, ask.lease, lease)
  call_back(scope, ask.lease, lease.expires)
end

local function first_to_end(scope)
  local found = {}
  local names = redis.call('ZRANGE', scope.d, 0, FORESEEN - 1)
  if #names == 0 then return found end
  for index, packed in ipairs(redis.call('HMGET', scope.l, unpack(names))) do
    if packed then
      found[#found + 1] = names[index]
      found[#found + 1] = packed
    end
  end
  return found
end

if not mark then return false end
local scopes, now = load_scopes()
local ask = args.ask
local known = live(scopes[1], ask.lease)
local decision = known
    and {
      kind = known.kind,
      hold = known.hold,
      ceiling = known.ceiling,
      expected = known.expected,
      target = known.target,
    }
  or decide(scopes, ask, now)
local refused = decision.kind == 'parallel' or decision.kind == 'cap' or decision.kind == 'rate'
if not known and not refused then
  for index, scope in ipairs(scopes) do
    open_lease(scope, ask, decision, decision.answers[index], now)
  end
end

decision.now = now
local books, windows, leases = {}, {}, {}
for index, scope in ipairs(scopes) do
  books[index] = save(scope, now)
  if refused then
    windows[index] = redis.call('HGETALL', scope.w)
    leases[index] = first_to_end(scope)
  end
end
return { cmsgpack.pack(decision), books, windows, leases }
