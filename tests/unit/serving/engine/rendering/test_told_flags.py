"""Flags of records that answers tell of: told by the ladder, and never rendered over by what skips it."""

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

from cache import records as layout
from cache.native import loader, pure
from cache.records import ABSENT_FLAGS, NIGHTLY_FLAGS, NO_ITEM, Layout, encode_topk
from cache.tiers.reads import Hit
from precompute.scoring.pages import encode_records
from serving.engine.rendering.json_answers import answer_start, plain_record_mask
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from tests.unit.serving.world import WIDTH, World, ask, entity

BIT = 8
TABLES = pytest.mark.parametrize("table", ["user_topk", "user_vector", "user_affinity"])


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    with patch.dict(layout.BIT_BY_ANSWER_FLAG, {"cold_start": BIT}):
        yield


def flag(world: World, snapshot: Snapshot, table: str, user: str) -> np.ndarray:
    """Sets the flag in the stored record of a user; returns all records of the table."""
    rows = np.frombuffer(
        world.remote.pages[snapshot.generation, table, 0], snapshot.manifest.tables[table].layout.dtype
    ).copy()
    rows["flags"][world.user_raws.index(user.encode())] |= BIT
    world.remote.pages[snapshot.generation, table, 0] = rows.tobytes()
    return rows


@TABLES
async def test_an_answer_tells_of_the_flag_of_its_record_and_the_next_one_does_not(table):
    world = World()
    snapshot = world.snapshot()
    flag(world, snapshot, table, "u3")

    lookup = ask(entity("u3", table), entity("u4", table))
    marked, unflagged_answer = await world.ladder.lookup(
        ServedGenerations(snapshot), lookup, asyncio.get_running_loop().time()
    )

    assert marked["cold_start"] is True and marked["source"] == "l2"
    assert "cold_start" not in unflagged_answer


@TABLES
@pytest.mark.parametrize("kernels", [loader.load_kernels({}), pure], ids=["compiled", "pure"])
def test_what_renders_records_unread_leaves_a_flagged_one_to_the_ladder(table, kernels):
    world = World()
    snapshot = world.snapshot()
    rows, of = flag(world, snapshot, table, "u3"), snapshot.manifest.tables[table]
    is_flagged = np.array([raw == b"u3" for raw in world.user_raws])

    with patch.object(loader, "kernels", kernels):
        is_plain = plain_record_mask(snapshot, of, rows, WIDTH)
        starts = [answer_start(snapshot, of, Hit(row.tobytes(), "l2", False, None), "u3", WIDTH) for row in rows]

    assert is_plain.tolist() == (~is_flagged).tolist()
    assert [start is None for start in starts] == is_flagged.tolist()


def test_a_row_without_an_answer_gets_no_flag_and_stays_absent():
    of, fingerprints = Layout("topk", 2, "f2"), np.array([1, 2, 3], np.uint64)
    items = np.array([[0, 1], [1, NO_ITEM], [0, 2]], np.uint32)
    scores = np.array([[2, 1], [1, 0], [2, 1]], np.float32)
    flags = np.array([BIT, BIT, 0], np.uint8)

    records, _ = encode_records(of, fingerprints, (items, scores), np.array([True, False, True]), 5, flags)

    assert records["flags"].tolist() == [NIGHTLY_FLAGS | BIT, ABSENT_FLAGS, NIGHTLY_FLAGS]
    assert (encode_topk(of, fingerprints, items, scores, 5, flags=flags)["flags"] & BIT).tolist() == [BIT, BIT, 0]
