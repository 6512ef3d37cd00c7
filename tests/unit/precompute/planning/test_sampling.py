"""The sample: whole histories of some users, always the same ones, and a count of all."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError, SourceError
from precompute.config.settings import NightConfig, Sources
from precompute.planning import sampling
from precompute.planning.sampling import draw_sample
from precompute.sources.readers import read_features, read_interactions
from precompute.sources.vocabulary import DistinctCounter

USERS = 400


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=80))
def test_few_are_counted_exactly(values):
    distinct_counter = DistinctCounter(hashes_max=64)
    for value in values:
        distinct_counter.add(np.array([value], np.uint64))

    assert distinct_counter.distinct_count == len(set(values))


def test_many_are_counted_within_what_the_estimator_promises():
    distinct_counter, rng = DistinctCounter(hashes_max=4096), np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 300_000, np.uint64)

    for _ in range(2):  # what comes again counts once
        for part in np.array_split(hashes, 30):
            distinct_counter.add(part)

    assert distinct_counter.distinct_count == pytest.approx(300_000, rel=4 / np.sqrt(4096))
    assert len(distinct_counter.smallest_hashes) == 4096


@pytest.fixture
def config(tmp_path, monkeypatch):
    """400 users with 1 to 7 interactions; user 3 has only features."""
    monkeypatch.setattr(sampling, "SAMPLED_USERS_MIN", 40)
    users = np.repeat(np.arange(USERS), np.arange(USERS) % 7 + 1)
    users = users[users != 3]
    pq.write_table(
        pa.table({
            "user": [f"u-{user}" for user in users],
            "item": [f"i-{row}" for row in range(len(users))],
            "timestamp": pa.array(1_700_000_000 + np.arange(len(users))),
        }),
        tmp_path / "clicks.parquet",
    )  # fmt: skip
    pq.write_table(
        pa.table({"user": [f"u-{user}" for user in range(USERS)], "age": pa.array(range(USERS))}),
        tmp_path / "users.parquet",
    )
    sources = Sources(("clicks.parquet",), user_features="users.parquet")
    return NightConfig(base=str(tmp_path), sources=sources)


def rows_of(sources, base):
    interactions_by_user: dict[str, list[tuple[str, int]]] = {}
    for batch in read_interactions(sources, base):
        for row in zip(
            batch.user_ids.row_texts().to_pylist(),
            batch.item_ids.row_texts().to_pylist(),
            batch.times_us.tolist(),
            strict=True,
        ):
            interactions_by_user.setdefault(row[0], []).append(row[1:])
    return interactions_by_user


def test_a_sample_holds_whole_histories_and_counts_all(config, tmp_path):
    sample = draw_sample(config, 0.01)

    written = rows_of(sample.write(tmp_path / "s", len(sample.user_ids), config.sources), tmp_path)
    everything = rows_of(config.sources, tmp_path)
    assert (sample.source_user_count, len(sample.user_ids)) == (USERS - 1, 40)
    assert sample.source_interaction_count == sum(map(len, everything.values()))
    assert written == {user: everything[user] for user in sample.user_ids}
    assert list(draw_sample(config, 0.01).user_ids) == list(sample.user_ids)


def test_a_larger_share_is_taken_as_asked(config):
    assert len(draw_sample(config, 0.5).user_ids) == round(0.5 * (USERS - 1))


def test_users_are_repeated_under_new_names(config, tmp_path):
    sample = draw_sample(config, 0.01)

    written = rows_of(sample.write(tmp_path / "s", 100, config.sources), tmp_path)

    lengths = sorted(map(len, written.values()))
    one_copy_lengths = sorted(map(len, rows_of(sample.write(tmp_path / "t", 40, config.sources), tmp_path).values()))
    half_copy_lengths = sorted(map(len, rows_of(sample.write(tmp_path / "r", 20, config.sources), tmp_path).values()))
    assert len(written) == 100
    assert lengths == sorted([*one_copy_lengths, *one_copy_lengths, *half_copy_lengths])


def test_features_come_along_also_for_who_has_only_those(config, tmp_path):
    sample = draw_sample(config, 1.0, feature_columns=["age"])

    sources = sample.write(tmp_path / "s", USERS + 10, config.sources)
    ages = [
        (user, age)
        for ids, columns in read_features(tmp_path / str(sources.user_features), "user", ["age"])
        for user, age in zip(ids.row_texts().to_pylist(), columns["age"].to_pylist(), strict=True)
    ]
    assert sample.source_user_count == USERS
    assert dict(ages[:USERS]) == {f"u-{user}": user for user in range(USERS)}
    assert len(dict(ages)) == USERS + 10


def test_what_is_newer_than_the_cut_does_not_count(config):
    cut = datetime.fromtimestamp(1_700_000_000 + 10, UTC)

    assert draw_sample(config, 1.0, cutoff_at=cut).source_interaction_count == 10


def test_features_that_no_file_holds_are_named(config):
    bare = replace(config, sources=replace(config.sources, user_features=None))

    with pytest.raises(SourceError, match="'age', but sources"):
        draw_sample(bare, 0.01, feature_columns=["age"])


def test_users_known_by_their_vectors_alone_are_sampled_too(config, tmp_path):
    users = [f"u-{user}" for user in range(60)]
    vectors = pa.array([[float(user), 1.0] for user in range(60)], pa.list_(pa.float32()))
    pq.write_table(pa.table({"user": users, "vector": vectors}), tmp_path / "vectors.parquet")
    alone = replace(config, sources=Sources(user_vectors="vectors.parquet"))

    sample = draw_sample(alone, 0.01)
    sources = sample.write(tmp_path / "s", len(sample.user_ids), alone.sources)

    assert (sample.source_user_count, len(sample.user_ids), sample.source_interaction_count) == (60, 40, 0)
    assert sources.interactions == ()
    assert sorted(pq.read_table(sources.user_vectors)["user"].to_pylist()) == sorted(sample.user_ids)


def test_sources_without_anybody_are_refused(config, tmp_path):
    empty = pa.table({"user": pa.array([], pa.string()), "item": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "clicks.parquet")

    with pytest.raises(ConfigError, match="name no entity"):
        draw_sample(config, 0.01)
