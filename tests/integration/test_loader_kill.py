"""kill -9 at random moments of a night: the live generation stays whole, and a re-run ends as if nothing had been."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cache.artefacts import generation_path, open_generation, read_manifest
from cache.embedded import Server
from infra.demo.service import ROOT
from precompute.config import NightConfig
from precompute.control import Control, connect
from precompute.load import parts_of, verify_part
from precompute.release import Releases
from precompute.states import State
from tests.integration.nights import NEXT, build_night, prepare, publish_night

COMPARED = ("directory/", "items/", "tables/", "defaults.json")

# Says when it begins, so that the kill is spread over the work and not over Python's start.
LOADER = """
import sys
from pathlib import Path
from tests.integration.test_loader_kill import night_in
from tests.integration.nights import NEXT, build_verified, publish
from precompute.night import run_night
config = night_in(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
print("begin", flush=True)
run_night(config, data_until=NEXT, run_after=None, attempt="killed")
print("end", flush=True)
"""


def night_in(folder: Path, redis_url: str, artifacts: str) -> NightConfig:
    """Small pages, one per round trip: most of the night is loading."""
    config = prepare(folder, redis_url, users=500, items=150)
    return replace(config, artifacts=artifacts, page_bytes=4096, load_chunk_bytes=4096)


@dataclass(frozen=True)
class Bench:
    """A folder with data and bundle, a Redis of our own, and what an undisturbed night leaves behind."""

    folder: Path
    redis_url: str
    undisturbed: Mapping[str, bytes]
    seconds: float

    def loader(self, artifacts: str) -> "subprocess.Popen[str]":
        """A night in a process of its own, about to begin its work."""
        process = subprocess.Popen(
            [sys.executable, "-c", LOADER, str(self.folder), self.redis_url, artifacts],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        return process

    def first_night(self, artifacts: str) -> NightConfig:
        """An empty Redis, and one generation live in it."""
        config = night_in(self.folder, self.redis_url, artifacts)
        with connect(self.redis_url, 5.0) as client:
            client.flushall()
        publish_night(config, "2026-01-29T00:00:00Z")
        return config


@pytest.fixture
def bench(tmp_path: Path, own_redis: Server) -> Bench:
    folder = tmp_path / "night"
    build_night(folder, own_redis.url, users=500, items=150)
    still = Bench(folder, own_redis.url, {}, 0.0)
    config = still.first_night("undisturbed")
    process = still.loader("undisturbed")
    assert process.stdout is not None
    began = time.perf_counter()
    assert process.stdout.readline() == "end\n"
    seconds = time.perf_counter() - began
    process.wait()
    return Bench(folder, own_redis.url, files(config, live(config)), seconds)


def live(config: NightConfig) -> str:
    with connect(config.redis_url, 5.0) as client:
        pointer = Control(client, config.keyspace()).pointer()
    assert pointer is not None
    return pointer.generation


def files(config: NightConfig, generation: str) -> dict[str, bytes]:
    """What must come out the same: directory, items, pages and defaults; not what a kill left half written beside."""
    root = config.store().local(generation_path(generation))
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        name: path.read_bytes()
        for path in found
        if (name := path.relative_to(root).as_posix()).startswith(COMPARED)
        and not path.name.startswith(".")
    }


def reports(config: NightConfig, first: str) -> dict[Path, tuple[int, bytes]]:
    """Finished costly steps of what is not the first generation, with the time of their last change."""
    root = config.store().local("generations")
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.glob("*/work/*.json")
        if first not in path.parts and path.stem != "assemble" and not path.name.startswith(".")
    }


def assert_whole(config: NightConfig, generation: str) -> None:
    """Every file has its checksum, every page in Redis too, and no page is unknown to the registry."""
    manifest, root = open_generation(config.store(), generation)
    keys = config.keyspace()
    with connect(config.redis_url, 5.0) as client:
        for part in parts_of(manifest):
            assert verify_part(client, keys, manifest, root, part) == part.pages.pages
        rows = set(Control(client, keys).rows())
        found: Any = client.keys(f"larder:*:{config.namespace}:g:*")
    pages = [key.decode() for key in found]
    assert pages
    assert all(key.split(":")[4] in rows for key in pages)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.storm)])
def test_a_killed_night_leaves_the_live_generation_whole_and_resumes(
    bench: Bench, kills: int
) -> None:
    seed = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed} (LARDER_SEED repeats it)")
    moments = random.Random(seed)
    for kill in range(kills):
        # given: a live generation
        config = bench.first_night(f"artifacts-{kill}")
        first = live(config)
        before = files(config, first)

        # when: the next night is killed
        process = bench.loader(f"artifacts-{kill}")
        moment = moments.uniform(0.0, bench.seconds)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()

        # then: readers still have a whole generation, the old one unless the new one was published whole
        now = live(config)
        with connect(config.redis_url, 5.0) as client:
            releases = Releases(config.store(), Control(client, config.keyspace()))
            published = now != first
            assert releases.state(now) is State.LIVE, f"after {moment:.3f} s"
        assert_whole(config, now)
        assert_whole(config, first)
        assert files(config, first) == before

        # when: the same night is run again
        finished = reports(config, first)
        publish_night(config, NEXT)

        # then: it went on where it stopped, and ends as if nothing had happened
        second = live(config)
        assert second != first
        assert not published or second == now
        assert reports(config, first).items() >= finished.items()
        assert files(config, second) == bench.undisturbed, f"killed after {moment:.3f} s"
        assert_whole(config, second)
        assert all(gate["passed"] for gate in read_manifest(config.store(), second).gates)
