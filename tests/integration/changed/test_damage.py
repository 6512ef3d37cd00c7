"""A damaged or vanished file of the base: what it was for is computed, and the night has the bytes of a full one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cache.store.artefacts import generation_path
from precompute.builds.reports import shard_report_name
from precompute.filters.item_attributes import ATTRIBUTES_FOLDER
from precompute.partitions.catalogue import ITEM_IDS_FILE, ITEM_VECTORS_FILE, directory_file_path
from precompute.partitions.digests import item_digests_path
from precompute.partitions.partition import POPULARITY_FILE, UNKNOWN_ITEMS_FILE
from precompute.scoring.copies import inputs_path
from tests.integration.changed import events
from tests.integration.changed.month import Month, spoil
from tests.integration.changed.prepared import Prepared
from tests.integration.changed.worlds import reference

FILES = (
    "tables/user_topk/0000.pages",
    "tables/user_topk.in_stock/0001.pages",
    "tables/item_similar/0000.pages",
    "tables/item_vector/0001.pages",
    "tables/user_affinity/0001.pages",
    "directory/user/0000.u64",
    directory_file_path("item", 1),
    "seen/0000.ends",
    "seen/0001.items",
    f"{ATTRIBUTES_FOLDER}/0000.values",
    ITEM_VECTORS_FILE,
    ITEM_IDS_FILE,
    inputs_path(0),
    item_digests_path("item_tower"),
    POPULARITY_FILE,
    UNKNOWN_ITEMS_FILE,
    "work/partition/0000.rows",
    "work/partition/0001.ids",
    "work/partition/0001.features",
)
REPORTS = (
    f"work/{shard_report_name(0)}.json", "work/embed_items.json", "work/begin.json", "manifest.json",
)  # fmt: skip
"""Files without a checksum, of which a bit may be another number."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Prepared:
    """A base, and a day after it on which an item left."""
    folder = tmp_path_factory.mktemp("damaged") / "night"
    month = reference(folder, redis_url, 7, users=120)
    return Prepared.of(month, [events.NAMED_EARLY], [events.USUAL, events.ITEMS_REMOVED])


def delete_file(month: Month, name: str) -> None:
    """Delete the file."""
    month.config.store().local(generation_path(month.generations[-1], name)).unlink()


def bit(month: Month, name: str) -> None:
    """Flip one bit of the file."""
    spoil(month.config, month.generations[-1], name)


def cut(month: Month, name: str) -> None:
    """Truncate the file."""
    path = month.config.store().local(generation_path(month.generations[-1], name))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, bit) for name in FILES]
    + [(name, how) for how in (cut, delete_file) for name in REPORTS]
    + [pytest.param(name, delete_file, marks=pytest.mark.storm) for name in FILES],
)
def test_a_night_over_a_damaged_base_is_as_a_full_one(
    name: str, how: Callable[[Month, str], None], world: Prepared, tmp_path: Path
) -> None:
    month = world.copy(tmp_path / "copy")
    how(month, name)

    generation = month.score()

    assert month.differences(generation, world.full) == []
