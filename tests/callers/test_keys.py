from __future__ import annotations

import string
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meter.callers.keys import SECRET_ALPHABET, MalformedCredential, new_key, new_secret, parse


def test_a_new_key_has_a_short_public_id_and_256_random_bits() -> None:
    key = new_key()
    assert len(key.public_id) == 16
    assert set(key.public_id) <= set(string.ascii_lowercase + string.digits)
    assert len(key.secret) == 43
    assert len(SECRET_ALPHABET) ** 43 > 2**256


def test_keys_made_at_the_same_moment_differ_in_both_parts() -> None:
    """T108"""
    keys = [new_key() for _ in range(1_000)]
    assert len({key.public_id for key in keys}) == len({key.secret for key in keys}) == 1_000


def test_what_was_made_is_parsed_back() -> None:
    for key in (new_key(), new_secret("abcd")):
        assert parse(key.text) == key


def test_a_secret_opens_its_own_hash_and_no_other() -> None:
    key = new_key()
    assert key.secret_sha256 == sha256(key.secret.encode()).hexdigest()
    assert key.opens(bytes.fromhex(key.secret_sha256))
    assert not key.opens(bytes.fromhex(new_key().secret_sha256))
    assert not key.opens(b"")


def test_no_repr_shows_the_secret() -> None:
    key = new_key()
    assert key.secret not in repr(key)
    assert key.secret_sha256 not in repr(key)


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "wk-",
        "wk--",
        "wk-abcd",
        "wk-abcd-",
        "wk-abc-secret",
        "sk-abcd-secret",
        "WK-abcd-secret",
        " wk-abcd-secret",
        "wk-abcd-secret\n",
        "wk-abcd-sec ret",
        "wk-abcd-sécret",
        "wk-abçd-secret",
        "wk-abcd-" + "a" * 257,
        "wk-" + "a" * 65 + "-secret",
        "wk-abcd-\ud800",
    ],
)
def test_what_is_no_key_is_malformed_and_the_error_does_not_repeat_it(credential: str) -> None:
    with pytest.raises(MalformedCredential) as caught:
        parse(credential)
    assert str(caught.value) == "must be wk-<public id>-<secret>"


@given(st.from_regex(r"[A-Za-z0-9]{4,64}", fullmatch=True), st.from_regex(r"[A-Za-z0-9_-]{1,256}", fullmatch=True))
def test_parsing_is_unambiguous(public_id: str, secret: str) -> None:
    found = parse(f"wk-{public_id}-{secret}")
    assert (found.public_id, found.secret) == (public_id, secret)
