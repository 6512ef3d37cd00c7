"""Bundles whose towers take feature columns: through the whole night, and answered live afterwards."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import Refused, SourceError
from cache.format.item_table import ItemTable, Ordinals
from cache.model.input_preparation import LiveInput
from cache.model.predictor import Predictor
from cache.records import NO_ITEM, decode_record
from cache.store.artefacts import sha256_of
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.config.settings import TableConfig
from precompute.gates.rules import skew
from precompute.partitions import catalogue
from precompute.partitions.night_input import NightInput
from precompute.partitions.partition import PartitionJob
from precompute.partitions.shard_input import read_shard
from precompute.planning.forecast import forecast
from precompute.planning.options import PlanParameters
from precompute.sources.unusable import UnusableRows, ids_named_in
from precompute.steps import begin, embed_items, index, quantize, score
from precompute.steps.night import Night
from tests.integration import nights
from tests.integration.feature_towers import (
    COUNTRIES,
    from_history_and_country,
    from_taste,
    vectors_column,
    with_towers,
)
from tests.integration.serving_app import serving
from tests.opened import open_generation

Kind = Literal["user_topk", "user_vector", "item_vector", "item_similar"]
NEW_ITEM = "not-in-the-vocabulary"
QUIET = "features-and-no-history"
CLICKED = 116
"""Users of the data who clicked anything."""


@pytest.fixture
def config(tmp_path, redis_url):
    config = nights.prepare(tmp_path, redis_url, users=120, items=60)
    users = [*sorted(nights.histories(config)), QUIET]
    pq.write_table(
        pa.table(
            {
                "user": users,
                "country": pa.array([row % COUNTRIES for row in range(len(users))], pa.int64()),
                "taste": vectors_column(len(users), 2),
            }
        ),
        tmp_path / "users.parquet",
    )
    item_ids = pq.read_table(tmp_path / "items.parquet")["item"].to_pylist()
    items = [*item_ids, NEW_ITEM]
    pq.write_table(pa.table({"item": items, "looks": vectors_column(len(items), 3)}), tmp_path / "items.parquet")
    kinds: tuple[Kind, ...] = ("user_topk", "user_vector", "item_vector", "item_similar")
    return replace(
        config,
        sources=replace(config.sources, user_features="users.parquet"),
        tables={name: TableConfig(name, k=20) for name in kinds},
    )


def opened(config, generation):
    manifest, root = open_generation(config.store(), generation)
    items = ItemTable.open(root, manifest)
    return manifest, items, Predictor.open(manifest, root, items)


def answer(manifest, items, predictor, table, source):
    prepared = predictor.prepare(table, source)
    record = decode_record(manifest.tables[table].layout, predictor.predict(table, [prepared], [1], 0)[0])
    assert record.item_ordinals is not None
    return items.ids_of(record.item_ordinals[record.item_ordinals != NO_ITEM])


def features_of(config, user, column):
    rows = pq.read_table(config.path("users.parquet")).to_pylist()
    value = next(row[column] for row in rows if row["user"] == user)
    return {column: tuple(value) if isinstance(value, list) else value}


def gate(manifest, rule):
    return next(verdict for verdict in manifest.gates if verdict["rule"] == rule)


def overlap(live_items, theirs):
    return len(set(live_items) & set(theirs)) / max(1, len(theirs))


def test_a_tower_of_history_and_features_is_published_and_answers_live(config):
    with_towers(config, from_history_and_country)

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, items, predictor = opened(config, generation)
    assert gate(manifest, "skew")["passed"] and manifest.models["user_tower"].int8
    histories = nights.histories(config)
    users = sorted(histories)[:8]
    stored_lists = nights.top_lists(config, generation, users)
    for user in users:
        live_input = LiveInput(
            tuple(item_id.encode() for item_id in histories[user]), features_of(config, user, "country")
        )
        assert overlap(answer(manifest, items, predictor, "user_topk", live_input), stored_lists[user]) >= 0.8


def test_a_tower_of_features_alone_is_published_in_fp32_and_answers_live(config):
    with_towers(config, lambda _items: from_taste())

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, items, predictor = opened(config, generation)
    verdict = gate(manifest, "int8_agreement")
    assert verdict["passed"] and verdict["value"] is None
    assert "no model is quantized" in verdict["note"]
    stored_lists = nights.top_lists(config, generation, [QUIET])
    live_input = LiveInput(features=features_of(config, QUIET, "taste"))
    assert answer(manifest, items, predictor, "user_topk", live_input) == list(stored_lists[QUIET])


def test_items_unknown_to_the_vocabulary_get_vectors_and_live_answers(config):
    with_towers(config, lambda _items: from_taste())

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, items, predictor = opened(config, generation)
    ordinal = items.ordinal_of(NEW_ITEM.encode())
    assert items.model_indices_of(Ordinals(np.array([ordinal])))[0] == -1
    assert np.linalg.norm(items.vectors[ordinal]) > 0.1
    rows = pq.read_table(config.path("items.parquet")).to_pylist()
    looks_vector = next(tuple(row["looks"]) for row in rows if row["item"] == NEW_ITEM)
    stored_items = nights.top_lists(config, generation, [NEW_ITEM], "item_similar")[NEW_ITEM]
    live_input = LiveInput(item_ordinal=ordinal, features={"looks": looks_vector})
    assert overlap(answer(manifest, items, predictor, "item_similar", live_input), stored_items) >= 0.8


def test_item_features_are_read_once_and_stay_as_the_night_began_with_them(config):
    with_towers(config, lambda _items: from_taste())
    expected = nights.publish_night(config, nights.DATA_UNTIL)
    vectors = open_generation(config.store(), expected)[0].items.vectors.sha256

    build = begin.run(config, data_until=nights.NEXT, run_after=None)
    table = pq.read_table(config.path("items.parquet"))
    pq.write_table(
        pa.table({"item": table["item"], "looks": vectors_column(len(table), 9)}), config.path("items.parquet")
    )
    embed_items.run(config, build)

    root = config.store().local(f"generations/{build['generation']}")
    assert sha256_of(root / catalogue.ITEM_VECTORS_FILE) == vectors
    with pa.memory_map(str(root / catalogue.ITEM_FEATURES_FILE)) as pinned:
        kind = pa.ipc.open_stream(pinned).schema.field("looks").type
    # Offsets have 64 bits: ten million items of 768 numbers are more than 32 bits can count.
    assert pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def test_an_item_without_a_feature_is_left_out_by_name(config):
    bundle = with_towers(config, lambda _items: from_taste())
    root, unusable = config.path("apart"), UnusableRows()
    items_table = pq.read_table(config.path("items.parquet"))
    looks_column = pa.array([*items_table["looks"].to_pylist()[:-1], None], items_table["looks"].type)
    pq.write_table(items_table.set_column(1, "looks", looks_column), config.path("items.parquet"))

    laid = catalogue.write_catalogue(config, bundle, root, unusable=unusable)

    assert catalogue.open_items(root, laid).ordinal_of(NEW_ITEM.encode()) < 0
    assert laid["items"] == len(items_table) - 1
    assert ids_named_in(unusable.to_json()) == {NEW_ITEM}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda config: replace(config, sources=replace(config.sources, user_features=None)),
         "user_features is not set"),
        (lambda config: (pq.write_table(
            pq.read_table(config.path("users.parquet")).rename_columns(["user", "land", "taste"]),
            config.path("users.parquet")), config)[1],
         "no column 'country'"),
    ],
)  # fmt: skip
def test_user_features_that_are_not_there_are_named(config, spoil, message):
    with_towers(config, from_history_and_country)
    with pytest.raises(SourceError, match=message):
        begin.run(spoil(config), data_until=nights.DATA_UNTIL, run_after=None)


def test_calibration_takes_the_first_shard_with_usable_input(config):
    """Few users have features; the shards before theirs hold nobody that the tower can answer for."""
    config = replace(config, shards=8, gates=replace(config.gates, coverage_of_source=0.0))
    bundle = with_towers(config, lambda _items: from_taste())
    root = config.path("apart")
    items = catalogue.open_items(root, catalogue.write_catalogue(config, bundle, root))
    users = pq.read_table(config.path("users.parquet"))
    night = NightInput(config, items)
    PartitionJob(night, root / "work/partition", feature_columns=["taste"]).run()
    last = read_shard(root / "work/partition", 7, history_limit=10)
    shard_users = set(last.entity_ids.to_pylist())
    keep = pa.array([user in shard_users for user in users["user"].to_pylist()])
    pq.write_table(users.filter(keep), config.path("users.parquet"))

    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    for shard in build["shards"]:
        score.run_shard(config, build, shard)
    assert set(index.run(config, build)["indexes"]) == {"inner_product", "cosine"}
    assert set(quantize.run(config, build)["models"]) == {"user_tower", "item_tower"}


def test_a_live_path_that_answers_otherwise_refuses_the_night(config, monkeypatch):
    """A gate of a tower with features compares: it does not let everything pass."""
    with_towers(config, from_history_and_country)
    monkeypatch.setattr(
        skew, "_feature_as_sent", lambda source, column, row: (source.features[column][row].as_py() + 1) % 5
    )
    with pytest.raises(Refused, match="skew"):
        nights.publish_night(config, nights.DATA_UNTIL)


def test_a_plan_samples_the_features_that_the_models_want(config):
    parameters = PlanParameters(seconds=0.1, data_until=nights.DATA_UNTIL)

    plan = forecast(config, parameters)

    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    scored = [score.run_shard(config, build, shard) for shard in build["shards"]]
    assert plan.shape.user_count == sum(shard_report["users"] for shard_report in scored)
    assert plan.shape.item_count == sum(shard_report["items"] for shard_report in scored)


async def test_a_user_of_the_feature_table_alone_is_answered_from_the_night(config):
    with_towers(config, from_history_and_country)
    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, items, predictor = opened(config, generation)

    stored_lists = nights.top_lists(config, generation, [QUIET])
    live_input = LiveInput(features=features_of(config, QUIET, "country"))
    assert overlap(answer(manifest, items, predictor, "user_topk", live_input), stored_lists[QUIET]) >= 0.8
    assert manifest.facts["users_in_source"] == manifest.entity_sets["user"].count == CLICKED + 1
    async with serving(config) as running:
        body = await running.get(f"/v1/lookup/user_topk/{QUIET}", k=5)
    assert body["producer"] == "batch"


def test_users_of_the_feature_table_alone_are_left_out_where_they_are_too_many(config, tmp_path):
    with_towers(config, from_history_and_country)
    with_strangers(config, 130)

    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)

    begin_report = Build.of(config, build).need_report(BEGIN_REPORT)
    assert (begin_report["users"], begin_report["featured"], begin_report["featured_users"]) == (CLICKED, 131, False)
    row = begin.in_night(Night(config, "attempt", data_until=nights.DATA_UNTIL))
    assert "131 users of the feature table alone get no records" in row.result_summary
    assert "featured_users = true" in row.result_summary


def test_all_of_them_are_computed_where_settings_say_so_and_the_gate_names_who_could_not(config):
    with_towers(config, from_history_and_country)
    with_strangers(config, 130, without_country=2)
    config = replace(config, featured_users=True)

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, _, _ = opened(config, generation)
    assert manifest.entity_sets["user"].count == CLICKED + 131 - 2
    verdict = gate(manifest, "coverage_of_source")
    assert verdict["passed"]
    assert "2 a value of 'country'" in verdict["note"]


def test_none_of_them_is_computed_where_settings_say_so(config):
    with_towers(config, from_history_and_country)

    generation = nights.publish_night(replace(config, featured_users=False), nights.DATA_UNTIL)

    manifest, _, _ = opened(config, generation)
    assert nights.top_lists(config, generation, [QUIET]) == {}
    assert manifest.facts["users_in_source"] == CLICKED


def with_strangers(config, count, without_country=0):
    """Add users to the feature table who never did anything; the last ones have no country."""
    table = pq.read_table(config.path("users.parquet"))
    countries = [row % COUNTRIES for row in range(count - without_country)]
    more = pa.table(
        {
            "user": [f"stranger-{row}" for row in range(count)],
            "country": pa.array(countries + [None] * without_country, pa.int64()),
            "taste": vectors_column(count, 4),
        }
    )
    pq.write_table(pa.concat_tables([table, more.cast(table.schema)]), config.path("users.parquet"))
