"""A DAG of every hour: its own tasks, its own ticks, and the second night copies what the first one has."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import redis

from cache.events.event import Event
from cache.process.redis_server import RedisServer
from cache.reuse import Reuse
from cache.store.artefacts import read_manifest
from tests.dags.test_parse import ROOT, in_airflow
from tests.integration.changed.month import FIRST, Month
from tests.integration.nights import prepare


def test_the_second_of_two_hourly_nights_copies_and_reads_only_the_hour_between(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    # given: the data from before the first tick
    config = prepare(tmp_path / "night", own_redis.url, users=120, items=60)
    month = Month.of(config, own_redis.url, seed=1)
    (tmp_path / "night/larder.toml").write_text(
        f'namespace = "{config.namespace}"\nartifacts = "artifacts"\nstate = "state"\nbundle = "bundle"\n'
        'shards = 2\nschedule = "0 * * * *"\n[tables.user_topk]\nkind = "user_topk"\nk = 10\n'
        '[sources]\ninteractions = "interactions"\nitem_features = "items.parquet"\n'
        "[events]\nenabled = true\n"
    )

    def night_after(moment: datetime) -> tuple[str, str]:
        """Tick and generation of the DAG's next run."""
        printed = in_airflow(
            tmp_path, str(ROOT / "tests/dags/hourly.py"), str(ROOT / "dags"), moment.isoformat(),
            LARDER_CONFIG=str(tmp_path / "night/larder.toml"), REDIS_URL=own_redis.url,
        )  # fmt: skip
        tick, generation = json.loads(printed.splitlines()[-1])
        return tick, generation

    # when: one night runs, then an hour's file and an event arrive, then another night runs
    first, first_generation = night_after(FIRST - timedelta(seconds=1))
    month.night = 1
    users, items = month.ids("user")[:6], month.ids("item")[:6]
    month.clicks(users, items, at=[FIRST + timedelta(minutes=5 + minute) for minute in range(6)])
    at_us = int((FIRST + timedelta(minutes=30)).timestamp()) * 1_000_000
    clicked = Event("e", at_us, month.ids("user")[6].encode(), items[0].encode())
    with redis.Redis.from_url(own_redis.url) as client:
        event_position = client.xadd(config.keyspace().events, {"e": clicked.to_bytes()}).decode()
    second, two = night_after(FIRST)

    _, skipped = night_after(FIRST - timedelta(seconds=1))

    # then
    assert skipped.startswith(f"skipped: {two} is live already, and newer than")
    assert [first, second] == [FIRST.isoformat(), (FIRST + timedelta(hours=1)).isoformat()]
    manifest = read_manifest(month.config.store(), two)
    assert manifest.events is not None and manifest.events.until == event_position
    reuse = Reuse.of(manifest.facts)
    assert reuse is not None
    assert (reuse.base_generation, reuse.lists_not_copied_because, reuse.sources_read_because) == (
        first_generation,
        "",
        "",
    )
    assert reuse.night.user_count_by_reason["inputs"] == len(users) + 1
    assert reuse.night.user_count_by_reason["copied"] == sum(reuse.night.user_count_by_reason.values()) - len(users) - 1
