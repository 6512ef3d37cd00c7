"""Ids that are asked for in vain become a worklist: bounded, without whoever is blocked or erased."""

import argparse
import csv
from pathlib import Path

import pytest
import redis

from cache.control.control_keys import Control
from cache.errors import ConfigError
from cache.l2.sync_clients import connect
from cache.store.blocklist import change_blocklist
from cache.usage.hot_keys import COLD_WINDOW, window_number_of
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.erasure.erasing import begin_erasing
from precompute.partitions.holdout import HOLDOUT_FILE
from precompute.usage.worklist import WorklistRow, make_rows, read_cold_counts, worklist
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import Running, eventually, serving
from tests.opened import open_generation


@pytest.fixture
def night(tmp_path: Path, redis_url: str) -> NightConfig:
    return build_night(tmp_path / "night", redis_url, users=120, items=60)


def read_worklist(night: NightConfig) -> list[WorklistRow]:
    with connect(night.redis_url, 5.0) as client:
        control = Control(client, night.keyspace())
        pointer = control.read_pointer()
        assert pointer is not None
        return make_rows(night.store(), read_cold_counts(control), pointer.generation)


async def look_up(app: Running, ids: list[str]) -> None:
    body = {"entities": [{"id": entity_id} for entity_id in ids]}
    await app.post("/v1/lookup/user_topk", body)


async def has_read_counts(night: NightConfig, expected: dict[str, int]) -> bool:
    return {row.entity: row.reads for row in read_worklist(night)} == expected


async def test_what_is_asked_for_in_vain_is_listed_most_asked_first(night: NightConfig) -> None:
    known_ids = sorted(histories(night))[:5]
    expected = {"often": 3, "once": 1, "live": 2}
    async with serving(night, quality_s=0.05) as app:
        await look_up(app, ["often", "once", *known_ids])
        await look_up(app, ["often", "often"])
        # The live model answers, then its stored answer does: with a record from the night neither would be needed.
        item = histories(night)[known_ids[0]][0]
        for _ in range(2):
            body = {"entities": [{"id": "live", "history": [item]}]}
            await app.post("/v1/lookup/user_topk", body)
        await app.get("/v1/lookup/item_similar/no-such-item")

        assert await eventually(lambda: has_read_counts(night, expected | {"no-such-item": 1}))

    assert [row.entity for row in read_worklist(night)][:2] == ["often", "live"]
    assert {row.standing for row in read_worklist(night)} == {"no input"}


async def test_blocked_and_erased_ids_are_neither_kept_nor_listed(night: NightConfig) -> None:
    async with serving(night, quality_s=0.05) as app:
        await look_up(app, ["stays", "blocked", "erased"])
        assert await eventually(lambda: has_read_counts(night, {"stays": 1, "blocked": 1, "erased": 1}))

        change_blocklist(night.store(), block_users=[b"blocked"])
        begin_erasing(night.store(), b"erased", "user", requested_at=1.0)

        assert await eventually(lambda: has_read_counts(night, {"stays": 1}))

        async def check_still_uncounted() -> bool:
            await look_up(app, ["blocked", "erased"])
            with redis.Redis.from_url(str(night.redis_url)) as client:
                day = window_number_of(Control(client, night.keyspace()).time(), COLD_WINDOW)
                cold_ids = client.zrange(night.keyspace().cold_names(day), 0, -1)
                return bool(cold_ids == [b"user_topk:stays"])

        assert await eventually(check_still_uncounted)


def test_the_command_shows_and_exports_the_standing_of_every_id(
    night: NightConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = night.keyspace()
    known_id = min(histories(night))
    with connect(night.redis_url, 5.0) as client:
        control = Control(client, keys)
        pointer = control.read_pointer()
        assert pointer is not None
        _, root = open_generation(night.store(), pointer.generation)
        (root / HOLDOUT_FILE).write_text('{"later": ["i1"]}')
        day = window_number_of(control.time(), COLD_WINDOW)
        for name, count, counted_day in ((known_id, 5, day), ("later", 2, day), ("later", 1, day - 1), ("a,b", 1, day)):
            client.zincrby(keys.cold_names(counted_day), count, f"user_topk:{name}")
    path = tmp_path / "worklist.csv"

    table, summary = worklist(night, argparse.Namespace(limit=2, export=str(path), json=False), quiet)

    assert getattr(table, "row_count", None) == 2 and str(summary).startswith("3 ids: ")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        list(WorklistRow._fields),
        ["user_topk", known_id, "5", "known"],
        ["user_topk", "later", "3", "coming"],
        ["user_topk", "a,b", "1", "no input"],
    ]
    with pytest.raises(ConfigError, match="--limit"):
        worklist(night, argparse.Namespace(limit=0, export=None, json=False), quiet)
