"""Credentials: `wk-<public id>-<secret>`. The secret has 256 random bits; only its SHA-256 is ever kept.

A fast hash is right here: nobody guesses 256 random bits, so slowing each guess (as for passwords) would buy nothing.
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
from dataclasses import dataclass, field
from hashlib import sha256

ID_ALPHABET = string.ascii_lowercase + string.digits
SECRET_ALPHABET = string.digits + string.ascii_letters
SECRET_LENGTH = 43
"""62⁴³ > 2²⁵⁶ > 62⁴²"""

_SHAPE = re.compile(r"wk-([A-Za-z0-9]{4,64})-([A-Za-z0-9_-]{1,256})")
"""An id has no '-', so the second one always ends it. Keys of the configuration file may have ids and secrets of other
lengths than ours."""


class MalformedCredential(ValueError):
    """Not of the form `wk-<public id>-<secret>`. Says nothing of what was given."""


@dataclass(frozen=True, slots=True)
class Credential:
    """One key as its holder has it. Its text opens doors, so it is in no `repr`."""

    public_id: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        return f"wk-{self.public_id}-{self.secret}"

    @property
    def secret_sha256(self) -> str:
        """Hex; what is stored."""
        return sha256(self.secret.encode()).hexdigest()

    def opens(self, digest: bytes) -> bool:
        """Whether `digest` is this secret's SHA-256, in constant time."""
        return hmac.compare_digest(sha256(self.secret.encode()).digest(), digest)


def new_key() -> Credential:
    """A fresh key: 82 random bits of public id, 256 of secret."""
    return Credential("".join(secrets.choice(ID_ALPHABET) for _ in range(16)), _base62(secrets.randbits(256)))


def new_secret(public_id: str) -> Credential:
    """A fresh secret for a key that is there."""
    return Credential(public_id, _base62(secrets.randbits(256)))


def parse(credential: str) -> Credential:
    """Takes `wk-<public id>-<secret>` apart; raises MalformedCredential."""
    found = _SHAPE.fullmatch(credential)
    if found is None:
        raise MalformedCredential("must be wk-<public id>-<secret>")
    return Credential(*found.groups())


def _base62(number: int) -> str:
    digits = []
    for _ in range(SECRET_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(SECRET_ALPHABET[digit])
    return "".join(digits)
