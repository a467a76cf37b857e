"""Errors of a worker, named by what may still be done."""

from __future__ import annotations


class EngineUnavailable(Exception):
    """Nothing of the answer was used: another backend may be tried. `phase` says where it ended, `status` what to answer."""

    def __init__(self, message: str, *, phase: str, status: int = 502) -> None:
        super().__init__(message)
        self.phase = phase
        """connect | send | first_event | head | busy"""
        self.status = status
        """502 refused or broken, 503 the worker is busy or leaving, 504 a deadline passed"""


class EngineBroke(Exception):
    """Part of the answer was passed on already: no other backend may be tried. `phase`: idle | cut | protocol."""

    def __init__(self, message: str, *, phase: str) -> None:
        super().__init__(message)
        self.phase = phase
