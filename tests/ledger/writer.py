"""A process that writes a journal for ever and says on stdout what is through: run and killed by test_kill.py."""

from __future__ import annotations

import sys
from pathlib import Path

from meter.ledger.journal import Journal
from tests.ledger.samples import opened


def main() -> None:
    journal = Journal(Path(sys.argv[1]), fsync_seconds=0.01, max_bytes=1 << 28, segment_bytes=64 * 1024)
    journal.start()
    while True:
        some = [opened() for _ in range(5)]
        for each in some:
            journal.opened(each)
            sys.stdout.write(f"opened {each.record.exchange_id}\n")
        for each in some[1:]:
            journal.finished(each.record)
            sys.stdout.write(f"finished {each.record.exchange_id}\n")
        sys.stdout.flush()


main()
