--[[ Charges what a key or team used before its books were here, once for all sidecars that look at the same time.

args     numbers: since (if it was done at that moment or later, it is not done again), debt owed now, the moment at which a
         burst was opened (-1: none). The lease's field stands for where the moment of the last time is noted, "p:<scope>".
         After the one scope: what the cap, the rate and the repay span were charged, each a msgpack array of moments and
         tokens in turn
Reply    {the moment, 1 if it was done, else 0}; without the mark the moment is 0
]]

local function recall_window(scope, window, packed, now)
  local past = cmsgpack.unpack(packed)
  for place = 1, window.span > 0 and #past or 0, 2 do
    add(scope, window, past[place], past[place + 1], now)
  end
end

local function recall_scope(scope, debt, opened, args, now)
  open_windows(scope)
  recall_window(scope, scope.cap, args[5], now)
  recall_window(scope, scope.rate, args[6], now)
  recall_window(scope, scope.repay, args[7], now)
  if debt > 0 then
    charge_debt(scope, now, debt)
    scope.moved = true
  end
  if opened > scope.opened then
    scope.opened, scope.changed = opened, true
  end
end

local function recall(keys, args)
  local lease_span, moment, since, debt, opened = struct.unpack('<ddddd', args[2])
  local now, terms = load(keys, args, lease_span, moment)
  if not now then return { 0, 0 } end
  local done = SLOT.lease and struct.unpack('<d', SLOT.lease) >= since
  if not done then
    recall_scope(SCOPES[1], debt, opened, args, now)
    put(args[3], struct.pack('<d', now))
    forget_at(args[3], now + MINUTE)
  end
  save(now, lease_span, terms)
  return { now, done and 0 or 1 }
end

register('recall', recall)
