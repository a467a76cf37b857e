"""`weir` on a machine whose clock is wrong: `python shifted_clock.py SECONDS serve -c …`, so many seconds ahead."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta

from meter import app
from meter.cli import main

AHEAD = float(sys.argv.pop(1))
right = time.time


def shifted_time() -> float:
    return right() + AHEAD


def shifted_now() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=AHEAD)


time.time = shifted_time
app.now = shifted_now  # the one place that names the wall clock for records
main()
