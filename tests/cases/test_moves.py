"""A key that an admin moves into another team, or whose windows are changed, while it is in use."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from tests.cases.house import NO_LIMITS, House, Key, streamed
from tests.cases.house import body as chat
from tests.cases.stub import DONE, FIN, OK, USE, T, stream
from tests.cases.wire import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def team(house: House, limit: int = 1_000_000) -> str:
    name = f"team-{secrets.token_hex(4)}"
    policy = {"cap": {"tokens": limit, "seconds": 3600}}
    reply = await house.admin("PUT", f"/teams/{name}", policy, [("If-None-Match", "*")])
    assert reply.status in (200, 201), reply.body
    return name


async def moved(house: House, key: Key, name: str | None) -> None:
    reply = await house.admin("PATCH", f"/keys/{key.id}", {"team": name}, [("If-Match", "*")])
    assert reply.status == 200, reply.body


async def window_of(house: House, path: str, scope: str) -> dict[str, Any]:
    windows = (await house.admin("GET", f"{path}/windows")).json()["windows"]
    found: dict[str, Any] = next(each for each in windows if (each["name"], each["scope"]) == ("hour", scope))
    return found


async def test_a_key_keeps_what_it_used_from_team_to_team_and_back(house: House) -> None:
    key, other = await house.key(limit=1000), await house.key(limit=1000)
    first, second = await team(house), await team(house)
    await moved(house, other, second)
    await house.spent(other, 100, 11)
    await house.spent(key, 500, 20)
    for place, used in ((first, 520), (second, 530), (None, 540), (first, 550)):
        await moved(house, key, place)

        async def in_place(used: int = used) -> int:
            return (await house.standing(key)).used

        await eventually(in_place, lambda found, used=used: found == used)
        await house.spent(key, 5, 5)
    assert await house.used(key) == 560
    assert (await house.post(key, chat(max_tokens=600))).status == 429
    assert await house.used(other) == 111
    rows = [*await house.rows(key, 5), *await house.rows(other, 1)]
    for name in (first, second):
        booked = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows if row["team_id"] == name)
        assert (await window_of(house, f"/teams/{name}", "team"))["used"] == booked


async def test_a_stream_that_runs_while_its_key_moves_is_held_and_booked_in_the_new_team(house: House) -> None:
    key, name = await house.key(limit=1000), await team(house)
    await house.spent(key, 40, 10)
    release = asyncio.Event()
    house.u1.does(stream(T("a"), release, T("b"), FIN, USE(9, 4), DONE))
    async with house.posted(key, streamed(max_tokens=50)) as client:
        await client.start()
        await client.event()
        held = (await house.standing(key)).reserved
        assert held > 50
        await moved(house, key, name)

        async def followed() -> tuple[int, int]:
            now = await window_of(house, f"/teams/{name}", "team")
            return now["used"] + now["held"], (await house.standing(key)).used

        await eventually(followed, lambda found: found[0] >= held and found[1] >= 50)
        assert (await house.standing(key)).leases == 1
        release.set()
        await client.reply()
    assert await house.used(key) == 50 + 13
    assert (await window_of(house, f"/teams/{name}", "team"))["held"] == 0
    await house.rows(key, 2)


async def test_a_window_made_longer_counts_what_had_slid_out(house: House) -> None:
    key = await house.key(limit=1000, window=2)
    await house.spent(key, 300, 50)

    async def left() -> int:
        return (await house.standing(key)).used

    await eventually(left, lambda used: used == 0, 10.0)
    await house.spent(key, 5, 5)
    changed = {**NO_LIMITS, "cap": {"tokens": 1000, "seconds": 3600}}
    reply = await house.admin("PUT", f"/keys/{key.id}/quota", changed, [("If-Match", "*")])
    assert reply.status == 200, reply.body
    await eventually(left, lambda used: used == 360)
    house.u1.does(OK(1, 1))
    assert (await house.post(key, chat(max_tokens=700))).status == 429
    await house.rows(key, 2)
