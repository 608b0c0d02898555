"""A browser, and a stand-in for the server where the real one cannot do what is tested."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.page.stand_in import StandIn
from tests.server.page.visitor import CHROMIUM, Visitor


@pytest.fixture(scope="module")  # not longer: while it runs, its event loop is in the way of other tests' own
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with driver.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """Opens the page at an address; in the end nobody may have had a complaint."""
    visitors: list[Visitor] = []

    def start(address: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, address, **options))
        return visitors[-1]

    yield start
    for visitor in visitors:
        visitor.close()


@pytest.fixture(scope="session")
def one_stand_in() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def stand_in(one_stand_in: StandIn) -> StandIn:
    one_stand_in.reset()
    return one_stand_in
