"""The table of user vectors that lists are made from, and the metric they are ranked by."""

from dataclasses import replace

import pytest

from cache.format.manifest import Table
from cache.records import Layout
from serving.generations.snapshot import Snapshot, ranking_metric, user_vector_table
from serving.requests.errors import Problem
from tests.unit.serving.world import World


def snapshot_of(tables: dict[str, Table], world: World) -> Snapshot:
    """A generation that has these tables."""
    snapshot = world.snapshot()
    return replace(snapshot, manifest=replace(snapshot.manifest, tables=tables))


def test_user_vectors_are_those_as_wide_as_the_items_vectors() -> None:
    world = World()
    tables = dict(world.snapshot().manifest.tables)
    wide = replace(tables["user_vector"], name="wide", layout=Layout("vector", 5, "f4"))
    of_items = replace(tables["user_vector"], name="item_vector", entity="item")

    snapshot = snapshot_of({"wide": wide, "item_vector": of_items, **tables}, world)

    assert user_vector_table(snapshot).name == "user_vector"


def test_a_generation_without_user_vectors_refuses_to_score() -> None:
    world = World()
    tables = {"user_topk": world.snapshot().manifest.tables["user_topk"]}

    with pytest.raises(Problem) as refused:
        user_vector_table(snapshot_of(tables, world))

    assert (refused.value.status, refused.value.reason) == (404, "unknown_table")
    assert refused.value.field == "table"


def test_lists_without_an_index_are_ranked_by_the_inner_product() -> None:
    snapshot = World().snapshot()

    assert ranking_metric(snapshot) == "inner_product"
    assert ranking_metric(snapshot, snapshot.manifest.tables["user_topk"]) == "inner_product"
