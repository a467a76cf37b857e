"""What a simulated worker may do wrong, and the words for it. Pure.

A fault is written `name` or `name:value`; several are separated by commas in the request header `x-sim-fault`, which is
laid over the simulator's own faults for this one request. They concern POST requests; /health, /metrics and the like stay
well. An *event* is one content event of a stream, which carries one token; a plain answer counts tokens instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

HEADER = b"x-sim-fault"


@dataclass(frozen=True, slots=True)
class Faults:
    """None or False: no such fault. Counts are events, times are seconds."""

    status: int | None = None
    garbage: bool = False
    hang: bool = False
    hang_after: int | None = None
    break_after: int | None = None
    cut_after: int | None = None
    error_after: int | None = None
    abort_after: int | None = None
    delay: float = 0.0
    first: float = 0.0
    keepalive: float | None = None
    nousage: bool = False
    close: bool = False


NONE = Faults()


def _events(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 86_400:
        raise ValueError
    return number


def _status(text: str) -> int:
    number = int(text)
    if not 400 <= number <= 599:
        raise ValueError
    return number


# name: (field, how its value is read or the value itself, what to write, what it does)
_KNOWN: dict[str, tuple[str, Callable[[str], Any] | Any, str, str]] = {
    "refuse": ("status", 503, "refuse", "503, as when the queue is full"),
    "status": ("status", _status, "status:CODE", "answers with this error, 400 to 599"),
    "garbage": ("garbage", True, "garbage", "bytes that are not HTTP"),
    "hang": ("hang", True, "hang", "takes the request and says nothing"),
    "hang-after": ("hang_after", _events, "hang-after:N", "falls silent after N events"),
    "break": ("break_after", _events, "break:N", "resets the connection after N events"),
    "cut": ("cut_after", _events, "cut:N", "closes the connection after N events, without the last chunk"),
    "error": ("error_after", _events, "error:N", "an error event inside the 200 after N events, then [DONE]"),
    "abort": ("abort_after", _events, "abort:N", "ends after N events with finish_reason abort, as on SIGTERM"),
    "delay": ("delay", _seconds, "delay:S", "waits S seconds before the head"),
    "first": ("first", _seconds, "first:S", "sends the head, then waits S seconds before the first event"),
    "keepalive": ("keepalive", _seconds, "keepalive:S", "a comment line after every S silent seconds of a stream"),
    "nousage": ("nousage", True, "nousage", "no usage anywhere"),
    "close": ("close", True, "close", "closes the connection after each answer, unannounced"),
}


def describe() -> str:
    """Every fault, one a line."""
    return "\n".join(f"{form:14} {what}" for _, _, form, what in _KNOWN.values())


def parse_fault(spec: str, onto: Faults = NONE) -> Faults:
    """`onto` with the faults of `spec` (`break:3, delay:0.2`) added. Raises ValueError with a sentence."""
    for part in filter(None, (part.strip() for part in spec.split(","))):
        onto = _add(onto, part)
    return onto


def parse_faults(specs: Iterable[str]) -> Faults:
    faults = NONE
    for spec in specs:
        faults = parse_fault(spec, faults)
    return faults


def _add(onto: Faults, part: str) -> Faults:
    name, colon, text = part.partition(":")
    if name not in _KNOWN:
        forms = ", ".join(form for _, _, form, _ in _KNOWN.values())
        raise ValueError(f"there is no fault {name!r}; there are {forms}")
    field, reader, form, what = _KNOWN[name]
    try:
        if callable(reader) == (not colon):
            raise ValueError
        return replace(onto, **{field: reader(text) if callable(reader) else reader})
    except ValueError:
        raise ValueError(f"the fault {part!r} is written {form}: {what}") from None
