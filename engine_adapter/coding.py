"""Answers that come compressed although none was asked to be: gzip and deflate (RFC 9110, section 8.4.1), piece by piece."""

from __future__ import annotations

import zlib
from typing import Final

AT_ONCE: Final = 256 * 1024
"""Decoded bytes that one step makes at most: a small piece may stand for a thousand times its size."""

_GZIP: Final = 16 + zlib.MAX_WBITS
_ZLIB: Final = zlib.MAX_WBITS
_BARE: Final = -zlib.MAX_WBITS


class Decoder:
    """Of one body. `finished`: what came so far ends where the coding says so."""

    def __init__(self, gzip: bool) -> None:
        self._gzip = gzip
        self._inflater = zlib.decompressobj(_GZIP) if gzip else None

    @property
    def finished(self) -> bool:
        return self._inflater is None or self._inflater.eof

    def step(self, data: bytes) -> tuple[bytes, bytes | None]:
        """What the next bytes stand for, at most AT_ONCE, and the bytes to give to the next step, None if there is
        nothing left. Raises ValueError for what is not of this coding."""
        if self._inflater is None or (self._gzip and self._inflater.eof and data):  # gzip may have several members
            self._inflater = zlib.decompressobj(_GZIP if self._gzip else _deflate(data))
        inflater = self._inflater
        if inflater.eof:
            if data:
                raise ValueError("bytes after its end")
            return b"", None
        try:
            decoded = inflater.decompress(data, AT_ONCE)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        left = inflater.unused_data or inflater.unconsumed_tail
        # all may be taken in and not yet be given out
        return decoded, left if left or len(decoded) == AT_ONCE else None


def decoder_of(coding: bytes) -> Decoder | None:
    """By the content-encoding field. Raises ValueError for one that is not known."""
    name = coding.strip().lower()
    if name in {b"", b"identity"}:
        return None
    if name in {b"gzip", b"x-gzip", b"deflate"}:
        return Decoder(gzip=name != b"deflate")
    raise ValueError(f"its content coding {name.decode('ascii', 'replace')!r} is not known, and none was asked for")


def _deflate(start: bytes) -> int:
    """Some servers leave the zlib wrapper out. With it, the first byte ends in 8 (RFC 1950, section 2.2)."""
    return _ZLIB if start[0] & 0x0F == 8 else _BARE
