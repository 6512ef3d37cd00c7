"""Both checkouts, and a shop whose first night was run by both."""

import os
import random
from collections.abc import Iterator

import pytest

from tests.checkouts import NoCheckout, frozen_checkout, working_tree
from tests.contract.side_by_side.nights import Nights, run_nights
from tests.contract.side_by_side.twins import Checkouts
from tests.contract.side_by_side.world import Shop, finish_shop, running_redis


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the requests; LARDER_SEED sets it."""
    seed = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {seed} (LARDER_SEED={seed} repeats it)")
    return seed


@pytest.fixture(scope="session")
def checkouts() -> Checkouts:
    """The checkouts of the frozen commit and of the working tree.

    A clone that lacks the commit fails, unless LARDER_WITHOUT_FROZEN_COMMIT says that this was seen and told elsewhere.
    """
    if os.environ.get("LARDER_WITHOUT_FROZEN_COMMIT"):
        pytest.skip("this clone lacks the frozen commit: git fetch --unshallow")
    missing = ""
    try:
        return frozen_checkout(), working_tree()
    except NoCheckout as error:
        missing = str(error)
    pytest.fail(missing, pytrace=False)


@pytest.fixture(scope="session")
def nights(checkouts: Checkouts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    """A night of each checkout over the same sources, each in a store and a Redis of its own."""
    folder = tmp_path_factory.mktemp("nights")
    with running_redis(folder / "redis-left") as left_url, running_redis(folder / "redis-right") as right:
        yield run_nights(folder, checkouts, (left_url, right))


@pytest.fixture(scope="session")
def shop(nights: Nights) -> Shop:
    """The shop that this tree's first night made, with all that a request can meet; no request was sent yet."""
    finish_shop(nights.shops[1], nights.redis_urls[1])
    return nights.shops[1]
