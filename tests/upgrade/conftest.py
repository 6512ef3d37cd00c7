"""Both releases, and a shop that both run."""

import os
from collections.abc import Iterator

import pytest

from cache.process.redis_server import server
from tests.conftest import redis_binary
from tests.upgrade.release import NoRelease, Release, last_release, working_tree
from tests.upgrade.shop import CUTS, Shop

Releases = dict[str, Release]
BOTH = ("old", "new")


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the data; `make upgrade-test SEED=...` prints and sets it."""
    return int(os.environ.get("LARDER_SEED", "0"))


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """The last tagged release (`old`) and the working tree (`new`)."""
    folder, missing = tmp_path_factory.mktemp("old"), ""
    try:
        found = last_release(folder)
    except NoRelease as error:
        missing = str(error)
    if missing:
        pytest.fail(missing, pytrace=False)
    return {"old": found, "new": working_tree()}


@pytest.fixture(scope="session", params=BOTH, ids="{}-first".format)
def shop(
    request: pytest.FixtureRequest,
    releases: Releases,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    """A night by each release, both followed by a service of each: what the tests then do starts and ends so."""
    first = str(request.param)
    folder = tmp_path_factory.mktemp(f"{first}-first")
    with server(folder / "redis", binary=redis_binary()) as redis:
        a, b = releases[first], releases["new" if first == "old" else "old"]
        shop = Shop(folder, redis.url, f"{first}-first", seed, a, b)
        shop.open()
        shop.tell(shop.first, "train")
        generation = shop.night(shop.first, CUTS[0])
        with shop.serving(list(releases.values())):
            shop.follow(generation)
            shop.follow(shop.night(shop.second, CUTS[1]))
            yield shop
