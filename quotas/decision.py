"""The quota rule, decided over one account's scopes: parallel, cap, base, burst, overage. Pure: no I/O, no clock.

`admit`, `progress`, `settle` and `renew` change the books; `verdict` and `view` explain them. The scripts beside this file
make the same changes where the state lives in Redis, and leave the explaining to this file. Moments and spans are
microseconds here; only what leaves in a `Verdict`, a `View` or a `Window` is seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quotas import windows as sliding
from quotas.books import Book, Lease, State, Terms, burst_at, target_terms
from quotas.forecast import retry_after
from quotas.store import Answer, Ask, LeaseView, Progress, Scope, Target, Verdict, VerdictKind, View, Window
from quotas.windows import SECOND


@dataclass(slots=True)
class Decision:
    """What the rule said. `scope` is the index of the scope whose limit refused; `answers` is each scope's own answer
    about the primary route, empty when that was not asked."""

    kind: VerdictKind
    hold: int = 0
    ceiling: int = 0
    expected: int = 0
    target: str | None = None
    scope: int | None = None
    answers: tuple[Answer, ...] = ()

    @property
    def admitted(self) -> bool:
        return self.kind in ("base", "burst", "overflow")


def bring_to(books: Sequence[Book], now: int) -> int:
    """Brings every scope to the same moment, which is never before one that was seen; returns it."""
    now = max(now, *(book.state.seen for book in books))
    for book in books:
        book.state.tick(book.terms, now)
    return now


def admit(books: Sequence[Book], ask: Ask, now: int, lease_span: int) -> Decision:
    """Decides, and books the lease in every scope if the answer is yes. The books must have been brought to `now`."""
    known = books[0].state.live(ask.lease)
    if known is not None:
        return Decision(known.kind, known.hold, known.ceiling, known.expected, known.target)
    decision = _decide(books, ask, now)
    if decision.admitted:
        _open(books, ask, decision, now, lease_span)
    return decision


def _decide(books: Sequence[Book], ask: Ask, now: int) -> Decision:
    if ask.forced:
        return _granted("base" if ask.primary else "overflow", ask, ask.ceiling)
    for index, book in enumerate(books):
        if book.too_parallel():
            return Decision("parallel", scope=index)
    lefts = [book.cap_left() for book in books]
    left = min(lefts)
    if left < ask.cap_need:
        return Decision("cap", scope=lefts.index(left))
    ceiling = min(ask.ceiling, left)
    expected = min(ask.expected, ceiling)
    answers = tuple(book.answer(now, expected) for book in books) if ask.primary else ()
    if answers and "no" not in answers:
        return _granted("burst" if "burst" in answers else "base", ask, ceiling, answers=answers)
    for target in ask.targets:
        if _target_answer(books[0].state, target, now, expected) == "base":
            return _granted("overflow", ask, ceiling, target.name, answers)
    return Decision("rate", expected=expected, scope=answers.index("no") if answers else 0, answers=answers)


def _granted(
    kind: VerdictKind, ask: Ask, ceiling: int, target: str | None = None, answers: tuple[Answer, ...] = ()
) -> Decision:
    return Decision(kind, min(ask.first_hold, ceiling), ceiling, min(ask.expected, ceiling), target, answers=answers)


def _target_answer(state: State, target: Target, now: int, expected: int, *, holds: bool = True) -> Answer:
    meter = state.target(target, now)
    if meter is None or target.rate is None:
        return "base"
    return meter.answer(target_terms(target.rate), now, expected, meter.held if holds else 0)


def _open(books: Sequence[Book], ask: Ask, decision: Decision, now: int, lease_span: int) -> None:
    key = books[0].scope.name
    for book, answer in zip(books, decision.answers or ("no",) * len(books), strict=True):
        lease = Lease(
            key=key,
            kind=decision.kind,
            opened=now,
            expires=now + lease_span,
            ceiling=decision.ceiling,
            hold=decision.hold,
            expected=decision.expected,
            rate_hold=decision.expected,
            cap_hold=decision.hold,
            target=decision.target,
        )
        if book.state.meter(lease) is None:
            lease.rate_hold = 0
        book.state.open(ask.lease, lease)
        primary = book.state.primary
        if decision.kind == "burst" and answer == "burst" and not primary.is_open(book.terms, now):
            primary.opened = now


def progress(books: Sequence[Book], name: str, consumed: int, extend_to: int | None, now: int, span: int) -> Progress:
    """Charges, renews, extends: in every scope or in none."""
    lease = books[0].state.live(name)
    if lease is None:
        return Progress(expired=True, extended=False, covered=0, left=0)
    leases = [(book.state, mine) for book in books if (mine := book.state.live(name)) is not None]
    for state, mine in leases:
        state.charge(now, mine, consumed)
        mine.expires = now + span
    left = min(book.cap_left() for book in books)
    more = max(0, (extend_to or 0) - lease.consumed - lease.cap_hold)
    extended = extend_to is not None and more <= left
    if extended:
        for state, mine in leases:
            mine.cap_hold += more
            state.cap_held += more
        left -= more
    return Progress(expired=False, extended=extended, covered=lease.consumed + lease.cap_hold, left=max(0, left))


def settle(books: Sequence[Book], name: str, consumed: int, now: int) -> bool:
    """Whether any scope knew the lease."""
    known = [book.state.close(name, now, consumed) for book in books]
    return any(known)


def renew(books: Sequence[Book], names: Iterable[str], now: int, lease_span: int) -> None:
    for name in names:
        for book in books:
            if (lease := book.state.live(name)) is not None:
                lease.expires = now + lease_span


# ---- the explanation --------------------------------------------------------------------------------------------------


def verdict(books: Sequence[Book], ask: Ask, decision: Decision, now: int, jitter: float) -> Verdict:
    """The decision as the caller is told it. `jitter`, 0 to 1, spreads the guesses."""
    shown = tuple(window for book in books for window in _windows(book, now))
    if decision.admitted:
        return admitted(decision, now, shown)
    blocked = _blocked(books, ask)
    impossible = not blocked and not _possible(books, ask)
    fits = not blocked and not impossible
    moment = retry_after(books, ask, now) if fits and not _is_guess(books, ask, decision, now) else None
    guess = fits and moment is None
    return Verdict(
        decision.kind,
        now / SECOND,
        expected=decision.expected,
        scope=books[decision.scope or 0].scope.kind,
        retry_after=1 + jitter / 2 if guess else moment,
        guess=guess,
        impossible=impossible,
        by_holds=decision.kind == "cap" and _cap_fits_without_holds(books, ask),
        blocked=blocked,
        windows=shown,
        answers=decision.answers,
    )


def admitted(decision: Decision, now: int, shown: Sequence[Window]) -> Verdict:
    return Verdict(
        decision.kind, now / SECOND, decision.hold, decision.ceiling, decision.expected, decision.target,
        windows=shown, answers=decision.answers,
    )  # fmt: skip


def _blocked(books: Sequence[Book], ask: Ask) -> bool:
    """Whether a limit of 0 bars this ask for good."""
    cap = any(book.terms.cap is not None and book.terms.cap.tokens == 0 for book in books) and ask.cap_need > 0
    parallel = any(book.terms.parallel == 0 for book in books)
    rates = [book.terms.most for book in books] if ask.primary else []
    rates += [target.rate.tokens for target in ask.targets if target.rate is not None]
    return cap or parallel or (0 in rates and not _route_possible(books, ask))


def _possible(books: Sequence[Book], ask: Ask) -> bool:
    caps = all(book.terms.cap is None or ask.cap_need <= book.terms.cap.tokens for book in books)
    return caps and _route_possible(books, ask)


def _route_possible(books: Sequence[Book], ask: Ask) -> bool:
    """Whether empty windows would let it onto some route. A primary that is down may come back."""
    if not ask.primary and not ask.targets:
        return True
    expected = _expected(books, ask)
    primary = ask.primary and all(book.terms.most is None or expected <= book.terms.most for book in books)
    return primary or any(target.rate is None or expected <= target.rate.tokens for target in ask.targets)


def _expected(books: Sequence[Book], ask: Ask) -> int:
    """What is expected of it where all windows are empty."""
    caps = (book.terms.cap.tokens for book in books if book.terms.cap is not None)
    return min(ask.expected, ask.ceiling, *caps)


def _is_guess(books: Sequence[Book], ask: Ask, decision: Decision, now: int) -> bool:
    """Whether nothing but running requests stands in the way (or the primary is down), so that no moment is known."""
    if decision.kind == "parallel" or (not ask.primary and not ask.targets):
        return True
    if decision.kind == "cap":
        return _cap_fits_without_holds(books, ask)
    expected = decision.expected
    primary = ask.primary and all(book.answer(now, expected, holds=False) != "no" for book in books)
    return primary or any(
        _target_answer(books[0].state, target, now, expected, holds=False) == "base" for target in ask.targets
    )


def _cap_fits_without_holds(books: Sequence[Book], ask: Ask) -> bool:
    return all(book.cap_left(holds=False) >= ask.cap_need for book in books)


def view(books: Sequence[Book], now: int) -> View:
    """The account as it stands; its leases are those of the first scope."""
    leases = tuple(
        LeaseView(
            name, lease.key, "overflow" if lease.kind == "overflow" else "primary",
            lease.cap_hold, lease.consumed, (now - lease.opened) / SECOND,
        )
        for name, lease in books[0].state.leases.items()
        if lease.booked is None
    )  # fmt: skip
    return View(now / SECOND, tuple(window for book in books for window in _windows(book, now)), leases)


def _windows(book: Book, now: int) -> list[Window]:
    state, meter = book.state, book.state.primary
    minute, repay, hour = meter.rate or _NONE, meter.repay or _NONE, state.cap or _NONE
    return windows(
        book.scope, book.terms, now, minute.total, minute.empty_at(), repay.total, meter.opened, meter.held,
        hour.total, hour.empty_at(), state.cap_held,
    )  # fmt: skip


_NONE = sliding.Window(1, 1)
"""Stands for a window that is not kept."""


def windows(
    scope: Scope,
    rule: Terms,
    now: int,
    minute: int,
    minute_empty: int,
    repay: int,
    opened: int,
    held: int,
    hour: int,
    hour_empty: int,
    cap_held: int,
) -> list[Window]:
    """The windows whose limits are in force: the burst's shows the repay span, and no room unless one may be had.

    `minute`, `repay`, `hour` are used; `…_empty`: when all of it has slid out; `opened`: when a burst was opened.
    """
    policy, kind, shown = scope.policy, scope.kind, list[Window]()
    if (rate := policy.rate) is not None:
        tokens, reset = rate.tokens, max(0, minute_empty - now) / SECOND
        shown.append(Window("minute", kind, tokens, rate.seconds, minute, held, max(0, tokens - minute - held), reset))
    if (burst := policy.burst) is not None and rule.repay is not None:
        tokens, wait = burst.tokens, max(0, burst_at(rule, opened, now) - now) / SECOND
        left = 0 if wait else max(0, tokens - repay - held)
        shown.append(Window("burst", kind, tokens, burst.seconds, repay, held, left, wait))
    if (cap := policy.cap) is not None:
        tokens, reset = cap.tokens, max(0, hour_empty - now) / SECOND
        shown.append(Window("hour", kind, tokens, cap.seconds, hour, cap_held, max(0, tokens - hour - cap_held), reset))
    return shown
