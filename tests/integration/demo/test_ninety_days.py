"""Ninety days of late data, retries, clears, backfills, overlaps, lost Redises and changing clocks, by seed."""

import os
import random
import re
from pathlib import Path

import pytest

from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.releases import all_releases
from tests.integration.demo.ninety_days import KEEP, QuickStore, Simulation

ZONES = [
    ("Europe/Berlin", "2026-02-01"),
    ("America/New_York", "2026-09-15"),
    ("America/New_York", "2026-01-20"),
    ("Europe/Berlin", "2026-09-01"),
]
STORM_SEEDS = 8


def a_seed() -> int:
    return int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 32))


def live_through(seed: int, folder: Path, redis_url: str, keys: Keyspace, zone: str, first_day: str) -> Simulation:
    """Run all ninety days, then check the history."""
    print(f"seed {seed}, {zone} from {first_day} (LARDER_SEED={seed} repeats it)")
    with connect(redis_url, 5.0) as client:
        season = Simulation(seed, QuickStore(str(folder)), client, keys, zone=zone, first_day=first_day)
        season.run()
        print(dict(sorted(season.counts.items())))
        check_history(season)
        season.pass_quiet_days()
        check_leaks(season)
    return season


def check_history(season: Simulation) -> None:
    live: str | None = None
    lifted: set[str] = set()
    published: set[str] = set()
    for release in all_releases(season.store):
        if release.action == "verify":
            lifted.add(release.generation)
        if not release.is_done or release.action not in ("publish", "roll_back", "restore"):
            continue
        if release.action == "publish":
            assert live is None or release.generation[:16] >= live[:16], "older data over newer"
            assert release.generation not in published or release.generation in lifted, "published twice"
            published.add(release.generation)
            lifted.discard(release.generation)
        if release.action == "restore":
            assert release.generation == live, "a restore made something else live"
        live = release.generation


def check_leaks(season: Simulation) -> None:
    pages = {
        key_match[1].decode()
        for name in season.stored_keys()
        if (key_match := re.match(rb"larder:1:[^:]+:g:([^:]+):", name))
    }
    rows = set(season.control.rows())
    assert pages <= rows, "pages of a generation that the registry does not know"
    recent = {name for name, at in season.created.items() if season.now_s - at < 8 * 86_400}
    stored_generations = set(season.store.names("generations"))
    assert len(stored_generations - recent) <= KEEP + 2, stored_generations
    assert len(rows - recent) <= KEEP + 6, rows


def test_ninety_days_of_nights_stay_in_order_and_the_service_knows_every_missing_one(
    tmp_path: Path, redis_url: str, keyspace: Keyspace
) -> None:
    seed = a_seed()
    season = live_through(seed, tmp_path, redis_url, keyspace, *ZONES[seed % len(ZONES)])

    assert season.counts["publish"] > 30
    assert min(season.counts[counter_name] for counter_name in ("missing", "not missing", "reader: newer")) > 0


@pytest.mark.storm
@pytest.mark.parametrize("number", range(STORM_SEEDS))
@pytest.mark.parametrize(("zone", "first_day"), ZONES, ids=str)
def test_many_seasons_of_ninety_days(
    tmp_path: Path, redis_url: str, keyspace: Keyspace, zone: str, first_day: str, number: int
) -> None:
    live_through(a_seed() + number, tmp_path, redis_url, keyspace, zone, first_day)
