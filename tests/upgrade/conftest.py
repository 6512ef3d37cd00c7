"""Both releases, and a shop that both run."""

import os
from collections.abc import Iterator

import pytest

from cache.process.redis_server import join_or_start_server
from tests.checkouts import Checkout, NoCheckout, checkout_of, frozen_commit, working_tree
from tests.conftest import redis_binary
from tests.upgrade.shop import CUTS, Shop

Releases = dict[str, Checkout]
BOTH = ("old", "new")


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the data; `make upgrade-test SEED=...` prints and sets it."""
    return int(os.environ.get("LARDER_SEED", "0"))


@pytest.fixture(scope="session")
def releases() -> Releases:
    """The frozen commit (`old`), or what LARDER_UPGRADE_FROM names, and the working tree (`new`)."""
    missing = ""
    try:
        frozen = frozen_commit()
        return {"old": checkout_of(os.environ.get("LARDER_UPGRADE_FROM") or frozen), "new": working_tree()}
    except NoCheckout as error:
        missing = str(error)
    pytest.fail(missing, pytrace=False)


@pytest.fixture(scope="session", params=BOTH, ids="{}-first".format)
def shop(
    request: pytest.FixtureRequest, releases: Releases, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """A night by each release, followed by a service of each; every test starts and ends in this state."""
    first = str(request.param)
    folder = tmp_path_factory.mktemp(f"{first}-first")
    with join_or_start_server(folder / "redis", server_binary=redis_binary()) as redis:
        a, b = releases[first], releases["new" if first == "old" else "old"]
        shop = Shop(folder, redis.url, f"{first}-first", seed, a, b)
        shop.open()
        shop.tell(shop.first, "train")
        generation = shop.night(shop.first, CUTS[0])
        with shop.serving(list(releases.values())):
            shop.follow(generation)
            shop.follow(shop.night(shop.second, CUTS[1]))
            yield shop
