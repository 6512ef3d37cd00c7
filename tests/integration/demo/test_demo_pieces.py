"""The demo's parts on their own: data that repeats itself, measures by hand, and a judge that notices."""

import dataclasses
import gzip
import itertools
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache.errors import ConfigError, SourceError
from infra.demo.checks import Judge, Question
from infra.demo.dataset import Dataset, synthetic, user_data
from infra.demo.evaluate import quality
from infra.demo.http import ServiceCounts
from infra.demo.run import prepare_demo_folder
from infra.demo.synthetic import World, synthesize
from infra.demo.traffic import Stream
from precompute.config.settings import NightConfig

SMALL = World(users=300, items=120, seed=5)
CURRENT_TIME = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_the_same_world_gives_the_same_clicks() -> None:
    # given, when
    first_clicks, two, other_seed_clicks = (
        synthesize(world) for world in (SMALL, SMALL, World(300, 120, seed=6))
    )

    # then
    for name in ("user_rows", "item_rows", "times"):
        assert np.array_equal(getattr(first_clicks, name), getattr(two, name))
    assert not np.array_equal(first_clicks.times, other_seed_clicks.times)
    assert first_clicks.user_ids == two.user_ids
    assert {"0000007", "team/57/a", "zoë-107", "用户 157"} <= {*first_clicks.user_ids}


def test_popularity_is_skewed_and_no_click_comes_twice() -> None:
    # given, when
    clicks = synthesize(World(users=2_000, items=500))

    # then
    counts = np.sort(np.bincount(clicks.item_rows, minlength=500))[::-1]
    assert counts[:50].sum() > 0.3 * counts.sum()
    pairs = set(zip(clicks.user_rows.tolist(), clicks.item_rows.tolist(), strict=True))
    assert len(pairs) == len(clicks.times)
    assert (np.diff(clicks.times) >= 0).all()


def test_what_is_held_out_is_newer_and_newcomers_are_unknown() -> None:
    # given, when
    data = synthetic(SMALL)

    # then
    assert data.initial_pairs.times.max() < data.first_cut.timestamp() * 1_000_000
    assert data.arriving.times.max() < data.second_cut.timestamp() * 1_000_000
    assert not set(data.newcomers) & set(data.histories)
    assert all(not set(items) & set(data.histories[user]) for user, items in data.held_out.items())
    assert data.held_out
    assert data.newcomers


def test_a_second_day_is_written_next_to_the_first(tmp_path: Path) -> None:
    # given
    data = synthetic(SMALL)
    data.write_first(tmp_path / "data")
    first = pq.read_table(tmp_path / "data/interactions")

    # when
    data.write_second(tmp_path / "data")

    # then
    both_days_table = pq.read_table(tmp_path / "data/interactions")
    assert len(first) == len(data.initial_pairs)
    assert len(both_days_table) == len(data.initial_pairs) + len(data.arriving)
    assert pq.read_table(tmp_path / "data/item_features.parquet").column_names == [
        "item",
        "category",
        "price",
    ]
    users = pq.read_table(tmp_path / "data/user_features.parquet")
    assert users.column_names == ["user", "country", "age"]
    assert set(data.histories) <= set(users["user"].to_pylist())


def test_lines_with_a_test_file_are_read_in_place(tmp_path: Path) -> None:
    # given
    with gzip.open(tmp_path / "train.txt.gz", "wt") as file:
        file.write("007 1 2 3\n8 2 3\n")
    (tmp_path / "test.txt").write_text("007 4 5\n8 1\n")

    # when
    data = user_data(tmp_path, current_time=CURRENT_TIME)
    data.write_first(tmp_path / "state")

    # then
    assert data.histories == {"007": ("1", "2", "3"), "8": ("2", "3")}
    assert data.held_out == {"007": ("4", "5"), "8": ("1",)}
    linked = tmp_path / "state/interactions/day-1.txt.gz"
    assert linked.resolve() == tmp_path / "train.txt.gz"


def test_a_csv_with_times_is_split_by_time(tmp_path: Path) -> None:
    # given: a hundred seconds, an item each
    rows = [f"u{second % 5},i{second},{1_700_000_000 + second}" for second in range(100)]
    (tmp_path / "clicks.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")

    # when
    data = user_data(tmp_path, current_time=CURRENT_TIME)

    # then
    assert len(data.initial_pairs) in range(88, 93)
    assert sum(map(len, data.held_out.values())) == 100 - len(data.initial_pairs)
    assert data.first_cut < data.second_cut


def test_without_times_one_item_of_every_user_is_held_out(tmp_path: Path) -> None:
    # given
    rows = [f"u{user},i{item}" for user in range(40) for item in range(4)] + ["few,i1", "few,i2"]
    (tmp_path / "clicks.csv").write_text("user,item\n" + "\n".join(rows) + "\n")

    # when
    first_dataset, two = (
        user_data(tmp_path / "clicks.csv", current_time=CURRENT_TIME) for _ in range(2)
    )

    # then
    assert first_dataset.held_out == two.held_out
    assert {len(items) for items in first_dataset.held_out.values()} == {1}
    assert "few" not in first_dataset.held_out
    assert len(first_dataset.histories["u3"]) == 3


def test_a_folder_without_interactions_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no interactions"):
        user_data(tmp_path, current_time=CURRENT_TIME)


def test_recall_and_ndcg_by_hand() -> None:
    # given: popular items in order a, b, c, d; the most popular that a user does not have
    histories = {"ann": ["a"], "bob": ["b", "c"], "cat": []}
    popular = ["a", "b", "c", "d"]
    lists = {
        user: [item for item in popular if item not in history][:2]
        for user, history in histories.items()
    }
    held_out = {"ann": ("c", "d", "e"), "bob": ("a",), "cat": ()}

    # when
    ranking_quality = quality(lists, held_out, top=2)

    # then: ann is shown b, c and hits at rank 2; bob is shown a, d and hits at rank 1; cat has nothing held out
    ann = (1 / math.log2(3)) / (1 + 1 / math.log2(3))
    assert ranking_quality.users == 2
    assert ranking_quality.recall == pytest.approx((1 / 3 + 1) / 2)
    assert ranking_quality.ndcg == pytest.approx((ann + 1.0) / 2)


def test_the_stream_repeats_itself_and_asks_mostly_for_popular_users() -> None:
    # given
    data = synthetic(SMALL)

    # when
    first_requests, two = ([*itertools.islice(Stream(data, seed=3), 400)] for _ in range(2))

    # then
    assert first_requests == two
    assert {request.kind for request in first_requests} == {
        "known_user", "batch", "exclude", "fresh", "similar", "tables", "stranger", "newcomer",
    }  # fmt: skip
    known_user_ids = [
        request.questions[0].id for request in first_requests if request.kind == "known_user"
    ]
    assert max(known_user_ids.count(user_id) for user_id in set(known_user_ids)) > 20


GOOD: dict[str, Any] = {
    "id": "ann", "source": "l2", "producer": "batch", "generation": "g1",
    "items": ["b", "c"], "scores": [2.0, 1.0], "short": False,
}  # fmt: skip
QUESTION = Question("user_topk", "ann", 2, frozenset({"x"}))


def judge() -> Judge:
    return Judge(histories={"ann": ("a",)})


def test_a_good_answer_breaks_nothing() -> None:
    watching = judge()

    watching.request([QUESTION], [GOOD])
    watching.published({"g1"})

    assert watching.broken == 0
    assert (watching.requests, watching.entities, dict(watching.sources)) == (1, 1, {"l2": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "bob"},
        {"source": "elsewhere"},
        {"source": "default", "producer": "defaults"},
        {"items": ["b", "x"]},
        {"items": ["a", "b"]},
        {"items": ["b", "b"]},
        {"scores": [1.0, 2.0]},
        {"items": ["b"], "scores": [2.0]},
        {"generation": "gone"},
        {"generation": "g9"},
    ],
)
def test_every_broken_rule_is_noticed(wrong: dict[str, Any]) -> None:
    # given
    watching = judge()

    # when
    watching.request([QUESTION], [{**GOOD, **wrong}], rolled_back_generations={"gone"})
    watching.published({"g1", "gone"})

    # then
    assert watching.broken


def test_two_generations_in_one_request_are_noticed() -> None:
    # given
    watching, second_question = judge(), Question("user_topk", "bob", 2)

    # when
    watching.request([QUESTION, second_question], [GOOD, {**GOOD, "id": "bob", "generation": "g2"}])

    # then
    assert "several generations" in watching.violations[0]


def test_two_answers_within_one_generation_are_noticed() -> None:
    # given
    watching, question_without_hidden = judge(), dataclasses.replace(QUESTION, hidden=frozenset())
    watching.request([question_without_hidden], [GOOD])

    # when
    watching.request([question_without_hidden], [{**GOOD, "items": ["c", "b"]}])

    # then
    assert "two different answers" in watching.violations[0]


def test_counters_that_do_not_add_up_are_reported() -> None:
    # given
    text = """
larder_entities_total{table="user_topk"} 3.0
larder_answers_total{source="l2",table="user_topk"} 2.0
larder_answers_total{source="default",table="user_topk"} 1.0
larder_misses_total{reason="negative",table="user_topk"} 1.0
larder_requests_total{route="POST /v1/lookup",status="200"} 3.0
"""

    # when
    counts = ServiceCounts.read(text)

    # then
    assert counts.disagreements({"l2": 2, "default": 1}, 3) == []
    assert len(counts.disagreements({"l2": 3}, 3)) == 1
    assert (
        len(dataclasses.replace(counts, entities=4).disagreements({"l2": 2, "default": 1}, 4)) == 2
    )
    assert len(dataclasses.replace(counts, errors=1).disagreements({"l2": 2, "default": 1}, 3)) == 1


def test_a_place_is_emptied_of_the_last_run_and_nothing_else(tmp_path: Path) -> None:
    # given
    with prepare_demo_folder(tmp_path) as demo_folder:
        write(demo_folder.home / "data" / "old", "x")
        write(tmp_path / "artifacts" / "mine", "y")

    # when
    with prepare_demo_folder(tmp_path) as reopened_folder:
        # then
        assert not (reopened_folder.home / "data").exists()
        assert (tmp_path / "artifacts" / "mine").exists()
        assert reopened_folder.namespace != demo_folder.namespace
        with pytest.raises(ConfigError, match="another demo"), prepare_demo_folder(tmp_path):
            pass


def test_the_written_settings_are_a_nights_settings(tmp_path: Path) -> None:
    # given
    data: Dataset = synthetic(SMALL)
    with prepare_demo_folder(tmp_path) as demo_folder:
        # when
        demo_folder.write_config(data)
        config = NightConfig.configured({}, demo_folder.config)

    # then
    assert config.namespace == demo_folder.namespace
    assert config.path(config.artifacts) == demo_folder.artifacts
    assert config.data_until == data.first_cut.isoformat()
    assert demo_folder.environment("redis://x", {"LARDER_TOKEN": "secret"})["LARDER_TOKEN"] == ""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
