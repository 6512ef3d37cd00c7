"""Users with a history whom no model answers: their inputs are published, so that events are added to these."""

import pyarrow as pa
import pyarrow.parquet as pq

from cache.format.ids import hash_id
from cache.format.manifest import Manifest
from cache.format.records.layout import ABSENT
from cache.store.artefacts import read_manifest
from tests.integration import nights
from tests.integration.changed.month import Month, scored
from tests.integration.taking.test_inputs import inputs_of


def without_features(month: Month, users: list[str]) -> None:
    """Clears what every model wants of some users."""
    path = month.config.path("users.parquet")
    table = pq.read_table(path)
    nothing = {"country": None, "mood": None}
    rows = [row | nothing if row["user"] in users else row for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def test_whoever_has_a_history_is_there_without_an_answer(featured: Month) -> None:
    month, lost = featured, featured.ids("user")[:3]
    without_features(month, lost)

    generation = month.publish()

    manifest: Manifest = read_manifest(month.config.store(), generation)
    table, found = inputs_of(month.config, generation)
    seed = manifest.entity_sets["user"].seed
    histories = nights.histories(month.config)
    for user in lost:
        published = found[hash_id(user.encode(), seed)]
        assert set(table.ids_of(published.items.astype("u4"))) == {*histories[user]}
        assert published.features == {}
    records = nights.raw_records(month.config, generation, lost, "user_topk")
    assert {each[14] for each in records.values()} == {ABSENT} and len(records) == 3
    # and: the next night, which copies, says the same
    month.night = 1
    full = scored(month.full, month.cut)
    assert month.differences(month.publish(), full) == []
