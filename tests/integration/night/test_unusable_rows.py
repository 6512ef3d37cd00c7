"""Nights over sources as a real company has them: what says nothing is left out, and costs nobody else anything."""

import random
from dataclasses import replace

import numpy as np
import onnx
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import numpy_helper

from cache.control.states import GenerationState
from cache.errors import Refused, SourceError
from cache.records import ABSENT_FLAGS
from cache.store.erasures import Erasure, request_erasure
from precompute.bundles.bundle import Bundle, write_bundle
from precompute.bundles.onnx_model import OnnxModel
from precompute.config.settings import TableConfig
from precompute.erasure.holders import holders_by_erasure_number
from precompute.partitions import catalogue
from precompute.releases.release_log import open_releases
from precompute.sources.unusable import ids_named_in
from precompute.steps import begin, embed_items, score
from tests.integration import nights
from tests.integration.feature_towers import DIMS, from_history_and_country, from_looks, from_mood, vectors_column
from tests.opened import open_generation


@pytest.fixture
def config(tmp_path, redis_url):
    """Towers of histories, countries and looks; a table of moods that wants a feature of its own."""
    config = nights.prepare(tmp_path, redis_url, users=120, items=60)
    users = sorted(nights.histories(config))
    rng = np.random.default_rng(5)
    table = {
        "user": users,
        "country": pa.array([row % 5 for row in range(len(users))], pa.int64()),
        "mood": pa.array(rng.random((len(users), 2)).astype("f4").tolist(), pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(table), tmp_path / "users.parquet")
    items = pq.read_table(tmp_path / "items.parquet")["item"].to_pylist()
    item_columns = {"item": items, "looks": vectors_column(len(items), 3)}
    pq.write_table(pa.table(item_columns), tmp_path / "items.parquet")
    ids = [raw.decode() for raw in Bundle.open(config.path(config.bundle)).item_ids]
    write_bundle(
        tmp_path / "towers", name="features", version="1", dims=DIMS, item_ids=ids,
        user_tower=from_history_and_country(len(ids)), item_tower=from_looks(),
        values={"mood": from_mood()},
    )  # fmt: skip
    tables = {
        "user_topk": TableConfig("user_topk", k=20),
        "user_vector": TableConfig("user_vector"),
        "item_similar": TableConfig("item_similar", k=20),
        "user_mood": TableConfig("value", value="mood"),
    }
    sources = replace(config.sources, user_features="users.parquet")
    return replace(config, bundle="towers", tables=tables, sources=sources)


def scored(config):
    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)
    embed_items.run(config, build)
    for shard in build["shards"]:
        score.run_shard(config, build, shard)
    return build["generation"], config.store().local(f"generations/{build['generation']}")


def published_bytes(root):
    """All that readers see: pages, directories, items and defaults."""
    files = [path for folder in ("tables", "directory", "items") for path in (root / folder).rglob("*")]
    files.append(root / "defaults.json")
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}


def read_begin_report(root):
    return orjson.loads((root / "work/begin.json").read_bytes())


def mixed_in(folder, name, rng, garbage):
    """Rows among those of a Parquet file; a column that a row does not give is null."""
    table = pq.read_table(folder / name)
    rows = pa.Table.from_pylist(
        [{**dict.fromkeys(table.column_names), **garbage_row} for garbage_row in garbage], table.schema
    )
    mixed_table, order = pa.concat_tables([table, rows]), list(range(len(table)))
    for row in range(len(garbage)):  # whole rows keep their order
        order.insert(rng.randrange(len(order) + 1), len(table) + row)
    pq.write_table(mixed_table.take(order), folder / name)


def after(folder, name, rows):
    """Rows at the end of a Parquet file."""
    table = pq.read_table(folder / name)
    pq.write_table(pa.concat_tables([table, pa.Table.from_pylist(rows, table.schema)]), folder / name)


@pytest.mark.parametrize("seed", [1, 2])
def test_garbage_among_clean_rows_changes_no_byte_that_readers_see(config, tmp_path, seed):
    clean = published_bytes(scored(config)[1])
    rng = random.Random(seed)
    item = pq.read_table(tmp_path / "items.parquet")["item"][0].as_py()
    bad_rows = [
        {"item": item}, {"user": "", "item": item}, {"user": "x" * 300, "item": item},
        {"user": "u"}, {"user": "u", "item": "y" * 257}, {"user": "u", "item": item},
    ]  # fmt: skip
    # Either all files have a column of weights, or none has.
    clicks = pq.read_table(tmp_path / "interactions.parquet")
    weights = pa.array([1.0] * len(clicks))
    pq.write_table(clicks.append_column("weight", weights), tmp_path / "interactions.parquet")
    weighted = [{**row, "weight": 1.0} for row in rng.choices(bad_rows, k=12)]
    mixed_in(tmp_path, "interactions.parquet", rng, weighted)
    texts = ["{},noon,1", ",1,1", "{},,1", "{},1700000000,heavy", "{},2026-02-31,1", "{},1e30,1", "{}", "{},NaN,1"]
    lines = [f"ghost,{rng.choice(texts).format(item)}" for _ in range(12)]
    (tmp_path / "garbage.csv").write_bytes(
        b"user,item,timestamp,weight\n" + "\n".join(lines).encode() + b"\ncaf\xe9,i,1,1\n"
    )
    known_user = pq.read_table(tmp_path / "users.parquet")["user"][0].as_py()
    nan = float("nan")
    ghosts = [{"country": 1}, {"user": "ghost", "country": None, "mood": [nan, 1.0]}, {"user": "z" * 300}]
    mixed_in(tmp_path, "users.parquet", rng, ghosts)
    after(tmp_path, "users.parquet", [{"user": known_user, "country": 3, "mood": [9.0, 9.0]}])
    broken = [{"item": f"broken-{row}", "looks": looks_value} for row, looks_value in enumerate(
        ([1.0], None, [nan] * DIMS, [*[1.0] * (DIMS - 1), None])
    )]  # fmt: skip
    mixed_in(tmp_path, "items.parquet", rng, [*broken, {"looks": [1.0] * DIMS}])
    after(tmp_path, "items.parquet", [{"item": item, "looks": [7.0] * DIMS}])
    sources = replace(config.sources, interactions=("interactions.parquet", "garbage.csv"))

    root = scored(replace(config, sources=sources))[1]

    assert published_bytes(root) == clean, f"seed {seed}"
    unusable_counts = read_begin_report(root)["unusable"]
    assert unusable_counts["interactions"]["left_out"] == 12 + 12 + 1
    assert unusable_counts["item_features"]["reasons"]["listed before"]["cases"] == [
        {"item": item, "file": "items.parquet"}
    ]
    assert unusable_counts["item_features"]["left_out"] == len(broken) + 2
    assert unusable_counts["user_features"]["reasons"]["listed before"] == {"rows": 1, "cases": [{"user": known_user}]}
    assert unusable_counts["user_features.mood"]["reasons"]["mood: not finite as float32"]["cases"] == [
        {"user": "ghost"}
    ]
    assert {"ghost", "broken-2"} <= ids_named_in(unusable_counts)


def spoilt(folder, user, mood):
    table = pq.read_table(folder / "users.parquet").to_pylist()
    for row in table:
        if row["user"] == user:
            row["mood"] = mood
    schema = pq.read_schema(folder / "users.parquet")
    pq.write_table(pa.Table.from_pylist(table, schema), folder / "users.parquet")


@pytest.mark.parametrize(
    ("mood", "source", "reason"),
    [
        ([float("nan"), 1.0], "user_features.mood", "mood: not finite as float32"),
        ([1.0, 1e-20], "records of user_mood", "does not fit its table's precision"),
    ],
)
def test_a_value_that_cannot_be_used_costs_its_user_one_table(config, tmp_path, mood, source, reason):
    users = pq.read_table(tmp_path / "users.parquet")["user"].to_pylist()
    spoilt(tmp_path, users[7], mood)

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    moods = nights.raw_records(config, generation, users, "user_mood")
    assert [user for user in users if moods[user][14] == ABSENT_FLAGS] == [users[7]]
    assert list(nights.raw_records(config, generation, users)) == users
    assert nights.top_lists(config, generation, [users[7]])[users[7]]
    unusable_counts = open_generation(config.store(), generation)[0].facts["unusable"][source]
    assert (
        unusable_counts["left_out"] == 1
        and reason in str(unusable_counts["reasons"])
        and users[7] in str(unusable_counts)
    )


def test_a_vector_that_is_not_finite_costs_its_users_their_lists(config, tmp_path):
    histories = nights.histories(config)
    rare = min({item for history in histories.values() for item in history},
               key=lambda item: sum(item in history for history in histories.values()))  # fmt: skip
    bundle = Bundle.open(config.path(config.bundle))
    tower = from_history_and_country(len(bundle.item_ids))
    model = onnx.load_from_string(tower.onnx.graph)
    rows = numpy_helper.to_array(model.graph.initializer[0]).copy()
    rows[bundle.item_ids.index(rare.encode())] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(rows, "rows"))
    write_bundle(
        tmp_path / "towers", name="features", version="2", dims=DIMS,
        item_ids=[raw.decode() for raw in bundle.item_ids],
        user_tower=replace(tower, onnx=OnnxModel(model.SerializeToString())), item_tower=from_looks(),
        values={"mood": from_mood()},
    )  # fmt: skip
    gates = replace(config.gates, unusable_rows=0.1, coverage_of_source=0.8)

    generation = nights.publish_night(replace(config, gates=gates), nights.DATA_UNTIL)

    lost_users = {user for user, history in histories.items() if rare in history[-64:]}
    for name in ("user_topk", "user_vector"):
        records = nights.raw_records(config, generation, sorted(histories), name)
        assert {user for user, record in records.items() if record[14] == ABSENT_FLAGS} == lost_users
    unusable_counts = open_generation(config.store(), generation)[0].facts["unusable"]["outputs of user_tower"]
    assert unusable_counts["left_out"] == len(lost_users) and lost_users >= ids_named_in({"": unusable_counts})


def test_an_item_whose_vector_is_not_finite_is_not_in_the_catalogue_and_costs_no_other(config, tmp_path):
    table = pq.read_table(tmp_path / "items.parquet")
    lost_item = table["item"][5].as_py()
    remaining_table = table.filter(pa.array([row != 5 for row in range(len(table))]))
    pq.write_table(remaining_table, tmp_path / "items.parquet")
    clean = published_bytes(scored(config)[1])
    rows = table.to_pylist()
    rows[5]["looks"] = [3e38] * DIMS  # finite, and their products are not
    pq.write_table(pa.Table.from_pylist(rows, table.schema), tmp_path / "items.parquet")

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, root = open_generation(config.store(), generation)
    assert published_bytes(root) == clean
    assert not nights.raw_records(config, generation, [lost_item], "item_similar")
    unusable_counts = manifest.facts["unusable"]["outputs of item_tower"]
    assert (unusable_counts["rows"], unusable_counts["left_out"]) == (len(table), 1)
    assert ids_named_in({"": unusable_counts}) == {lost_item}
    assert manifest.facts["items_without_vector"] == 1


def test_a_tower_that_has_a_vector_for_no_item_is_refused_in_begin(config, tmp_path):
    table = pq.read_table(tmp_path / "items.parquet")
    looks_column = pa.array([[3e38] * DIMS] * len(table), table.schema.field("looks").type)
    pq.write_table(table.set_column(1, "looks", looks_column), tmp_path / "items.parquet")

    with pytest.raises(SourceError, match="none of the 60 rows of the outputs of item_tower"):
        begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)


def test_an_item_that_loses_its_vector_after_begin_ends_the_night_by_name(config, monkeypatch):
    """As on a device whose numbers overflow where the processor's do not."""
    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)
    vectors = np.ones((60, DIMS), np.float32)
    vectors[7, 3] = np.inf
    monkeypatch.setattr(embed_items, "embed_catalogue", lambda *_: iter((vectors[:5], vectors[5:])))
    root = config.store().local(f"generations/{build['generation']}")
    items = catalogue.open_items(root, read_begin_report(root))

    with pytest.raises(Refused, match=f"non-finite vector for item '{items.id_of(7)}'"):
        embed_items.run(config, build)


def test_more_than_the_share_is_refused_by_reason_and_may_be_overridden(config, tmp_path):
    mixed_in(tmp_path, "users.parquet", random.Random(0), [{"country": 1}] * 3)
    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)
    with pytest.raises(Refused, match=r"unusable_rows is 0\.0\d+, the threshold 0\.001 .*user: no id: 3") as caught:
        nights.publish_night(config, nights.DATA_UNTIL)
    assert caught.value.details["rule"] == "unusable_rows"
    with open_releases(config) as releases:
        assert releases.state(build["generation"]) is GenerationState.REFUSED
    lenient = replace(config, gates=replace(config.gates, unusable_rows=0.05))
    assert nights.publish_night(lenient, nights.NEXT)


@pytest.mark.parametrize(
    ("file", "column", "values", "message"),
    [
        ("users.parquet", "country", lambda n: pa.array(["de"] * n), "'country' is string.*takes int64"),
        ("users.parquet", "mood", lambda n: pa.array([[1.0]] * n), "'mood' that the model's input 'mood' can use"),
        ("users.parquet", "country", lambda n: pa.nulls(n, pa.int64()), "in column 'country'"),
        ("items.parquet", "looks", lambda n: pa.array([[1] * 3] * n, pa.list_(pa.int8(), 3)), "looks.*lists of width"),
        ("items.parquet", "looks", lambda n: pa.array([[float("nan")] * DIMS] * n), "none of the 60 rows of items"),
        ("users.parquet", "user", lambda n: pa.array([1.5] * n), "'user' is double.*Int64"),
    ],
)  # fmt: skip
def test_what_no_row_can_be_read_from_is_refused_in_begin(config, tmp_path, file, column, values, message):
    table = pq.read_table(tmp_path / file)
    column_index = table.column_names.index(column)
    pq.write_table(table.set_column(column_index, column, values(len(table))), tmp_path / file)
    with pytest.raises(SourceError, match=message):
        begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)


def test_an_id_that_a_report_names_is_held_until_that_generation_is_gone(config, tmp_path):
    """An erasure is done only when no generation names the id any more."""
    item = pq.read_table(tmp_path / "items.parquet")["item"][0].as_py()
    mixed_in(tmp_path, "interactions.parquet", random.Random(0), [{"user": "shy", "item": item}])
    generation, root = scored(config)
    assert ids_named_in(read_begin_report(root)["unusable"]) == {"shy", item}

    erasures = [Erasure(1, "shy", "user", 0.0), Erasure(2, "nobody", "user", 0.0)]
    holders_by_erasure = holders_by_erasure_number(config.store(), erasures, {})

    generations_by_erasure = {
        number: [holder.generation for holder in erasure_holders]
        for number, erasure_holders in holders_by_erasure.items()
    }
    assert generations_by_erasure == {1: [generation], 2: []}
    request_erasure(config.store(), b"shy", "user", requested_at=0.0)
    assert "shy" not in ids_named_in(read_begin_report(scored(config)[1])["unusable"])
