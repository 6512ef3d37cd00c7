"""The way back from a format that the release before does not read."""

from pathlib import Path

import orjson
import pytest

from cache.errors import UnknownFormat
from cache.format.manifest import Manifest
from cache.formats import FORMATS, MANIFEST
from cache.process.redis_server import join_or_start_server
from cache.store.artefacts import generation_path
from tests.conftest import redis_binary
from tests.upgrade.conftest import BOTH, Releases
from tests.upgrade.shop import CUTS, Shop, until

pytestmark = pytest.mark.slow

UNREAD = FORMATS[MANIFEST].newest_readable_version + 1
SAID = f"format {UNREAD}"


def test_what_the_release_before_cannot_read_is_refused_by_it_and_left_by_a_roll_back(
    releases: Releases, seed: int, tmp_path: Path
) -> None:
    with join_or_start_server(tmp_path / "redis", server_binary=redis_binary()) as redis:
        shop = Shop(tmp_path, redis.url, "left", seed, releases["old"], releases["new"])
        shop.open()
        shop.tell(releases["old"], "train")
        first = shop.night(releases["old"], CUTS[0])
        second = shop.night(releases["new"], CUTS[1], newer_format=f"manifest={UNREAD}")
        raw = shop.store.read(generation_path(second, "manifest.json"))
        assert raw is not None and orjson.loads(raw)["format"] == UNREAD and first != second
        with pytest.raises(UnknownFormat, match=SAID):
            Manifest.from_bytes(raw)

        with shop.serving(list(releases.values())):
            for name in BOTH:  # from the generation before, and drained
                assert until(lambda name=name: shop.ready(name)["generation"] == first)  # type: ignore[misc]
                assert not shop.ready(name)["ready"] and SAID in shop.log(name)
            for release in releases.values():
                shop.refusal(release, "night", "--data-until", CUTS[2])
            roll_back_process = releases["new"].run(
                "tests.upgrade.newer", f"manifest={UNREAD}", "precompute", "roll-back", "--reason", "a test",
                environ=shop.environ(),
            )  # fmt: skip
            assert roll_back_process.returncode == 0, roll_back_process.stderr
            shop.follow(first)
            # Its files stop older nights until the newer release has retired them.
            assert SAID in shop.refusal(releases["old"], "night", "--data-until", CUTS[2])
