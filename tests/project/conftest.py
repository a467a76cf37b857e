"""One running demo for the tests that compare what is written with what the product does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.project import demo as demonstration


@pytest.fixture(scope="session")
def demo() -> Iterator[demonstration.Demo]:
    with demonstration.running() as running:
        yield running


@pytest.fixture(scope="session")
def tour(demo: demonstration.Demo) -> dict[str, str]:
    """What each step of the tour printed, pasted one after the other as a reader would."""
    return {heading: demo.paste(heading) for heading in demo.headings}
