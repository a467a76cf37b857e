"""The structured log: one JSON object a line on stderr (or plain text for people)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

log = logging.getLogger("weir")


def configure(level: str, style: Literal["json", "text"]) -> None:
    """Sends everything to stderr, once. Libraries speak from warnings on, whatever our own level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    log.setLevel(level.upper())


def say(level: int, event: str, **fields: Any) -> None:
    """One line: what happened, and its figures."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})


def info(event: str, **fields: Any) -> None:
    say(logging.INFO, event, **fields)


def warning(event: str, **fields: Any) -> None:
    say(logging.WARNING, event, **fields)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.name != log.name:
            line["logger"] = record.name
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # text from outside may hold lone surrogates
            return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        line = f"{moment} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
