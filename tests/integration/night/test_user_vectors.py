"""Vectors of users that a night is given: scored as they are, judged like the tower's, erased and planned with."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import SourceError
from cache.format.ids import hash_id
from cache.format.item_table import ItemTable
from cache.format.manifest import Artefact
from cache.model.agreement import SKEW_RULE
from cache.quality.probe import PROBE_FACT, Probe
from cache.records import decode_record
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.planning.sampling import draw_sample
from precompute.steps import begin
from tests.integration import nights
from tests.opened import open_generation

DIMS = 16
ONLY = "known-by-a-vector-alone"


def write(config, users, vectors):
    column = pa.array(vectors, pa.list_(pa.float64()))
    pq.write_table(pa.table({"user": users, "vector": column}), config.path("user_vectors.parquet"))


@pytest.fixture
def config(tmp_path, redis_url):
    config = nights.prepare(tmp_path, redis_url, users=120, items=60)
    return replace(config, sources=replace(config.sources, user_vectors="user_vectors.parquet"))


@pytest.fixture
def user_vectors(config):
    """Vectors of every other user, and of one of whom nothing else is known."""
    users = [*sorted(nights.histories(config))[::2], ONLY]
    vectors = np.random.default_rng(3).standard_normal((len(users), DIMS)).astype(np.float32)
    write(config, users, vectors.tolist())
    return dict(zip(users, vectors, strict=True))


def test_users_are_answered_from_their_vectors_and_the_others_by_the_tower(config, user_vectors):
    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, root = open_generation(config.store(), generation)
    items = ItemTable.open(root, manifest)
    names = items.ids_of(np.arange(items.count, dtype=np.uint32))
    layout = manifest.tables["user_vector"].layout
    stored_records = nights.raw_records(config, generation, list(user_vectors), "user_vector")
    lists = nights.top_lists(config, generation, [*user_vectors, *nights.histories(config)])
    histories = nights.histories(config)
    for user, vector in user_vectors.items():
        assert np.allclose(decode_record(layout, stored_records[user]).numbers, vector, rtol=2**-10, atol=1e-6)
        scores = np.asarray(items.vectors) @ vector
        ranked_items = [names[at] for at in np.argsort(-scores, kind="stable")]
        seen_items = set(histories.get(user, []))
        assert lists[user] == tuple(item for item in ranked_items if item not in seen_items)[: nights.K]
    assert set(histories) <= lists.keys()
    assert SKEW_RULE in {gate["rule"] for gate in manifest.gates if gate["passed"]}


def test_the_probe_holds_those_who_were_scored_by_the_tower_and_no_others(config, user_vectors):
    """Else a service that computes answers once more would call lists from vectors drift."""
    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, root = open_generation(config.store(), generation)
    artefact = Artefact(**manifest.facts[PROBE_FACT])
    probe = Probe.open(root / artefact.path, ItemTable.open(root, manifest))
    seed, histories = manifest.entity_sets["user"].seed, nights.histories(config)
    probed = {user for user in histories if probe.input_of(hash_id(user.encode(), seed)) is not None}
    assert probed == histories.keys() - user_vectors.keys()


def test_where_all_users_bring_vectors_there_is_no_skew_to_measure(config):
    users = sorted(nights.histories(config))
    rng = np.random.default_rng(4)
    write(config, users, rng.standard_normal((len(users), DIMS)).tolist())

    generation = nights.publish_night(config, nights.DATA_UNTIL)

    manifest, _ = open_generation(config.store(), generation)
    assert manifest.facts[PROBE_FACT] is None
    assert {gate["rule"] for gate in manifest.gates} >= {"exact_lists", "exact_numbers"}
    assert all(gate["passed"] for gate in manifest.gates)


def test_vectors_that_say_nothing_are_noted_and_their_users_left_to_the_tower(config, user_vectors):
    users = sorted(nights.histories(config))[:4]
    good = [1.0] * DIMS
    write(config, [*users, users[0]], [good, [float("nan")] * DIMS, good[:3], None, good])

    build = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)

    unusable_text = str(Build.of(config, build).need_report(BEGIN_REPORT)["unusable"])
    for user in users[:3]:
        assert user in unusable_text
    assert users[3] not in unusable_text


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0] * 4, [2.0] * 4], "no vector that can be used"),
        (None, "lists of width 16"),
        ("missing", "user_vectors.parquet"),
    ],
)
def test_a_table_that_holds_no_vector_of_the_bundles_dimensions_is_named(config, vectors, message):
    if vectors is None:
        pq.write_table(pa.table({"user": ["a"], "vector": [1.5]}), config.path("user_vectors.parquet"))
    elif vectors != "missing":
        write(config, ["a", "b"], vectors)

    with pytest.raises(SourceError, match=message):
        begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)


def test_other_vectors_make_another_generation(config, user_vectors):
    first = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)
    write(config, list(user_vectors), [(2 * vector).tolist() for vector in user_vectors.values()])
    second = begin.run(config, data_until=nights.DATA_UNTIL, run_after=None)

    assert first["generation"] != second["generation"]


def test_a_plan_samples_the_vectors_too(config, user_vectors, tmp_path):
    sample = draw_sample(config, 1.0)
    sources = sample.write(tmp_path / "sample", len(sample.user_ids), config.sources)

    sampled_vectors = pq.read_table(sources.user_vectors)
    assert sorted(sampled_vectors["user"].to_pylist()) == sorted(user_vectors)
    assert ONLY in sample.user_ids
