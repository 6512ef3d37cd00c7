"""The demo's parts on their own: data that repeats itself, measures by hand, and a judge that notices."""

import dataclasses
import gzip
import itertools
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import ConfigError, SourceError
from infra.demo.checks import InvariantViolation, Judge, Question, metric_contradictions
from infra.demo.dataset import INTERACTIONS_FILE, make_synthetic_data, read_user_data
from infra.demo.evaluate import recall_and_ndcg
from infra.demo.run import prepare_demo_folder, process_environment, write_settings
from infra.demo.synthetic import WorldSettings, synthesize
from infra.demo.traffic import RequestStream
from precompute.config.settings import NightConfig
from serving.client import Answer, Source

SMALL = WorldSettings(user_count=300, item_count=120, seed=5)
TODAY = datetime(2026, 1, 31, tzinfo=UTC)


def test_the_same_world_gives_the_same_clicks() -> None:
    # given, when
    first_clicks, two, other_seed_clicks = (
        synthesize(world) for world in (SMALL, SMALL, WorldSettings(300, 120, seed=6))
    )

    # then
    for name in ("user_rows", "item_rows", "times_us"):
        assert np.array_equal(getattr(first_clicks, name), getattr(two, name))
    assert not np.array_equal(first_clicks.times_us, other_seed_clicks.times_us)
    assert first_clicks.user_ids == two.user_ids
    assert {"0000007", "team/57/a", "zoë-107", "用户 157"} <= {*first_clicks.user_ids}


def test_popularity_is_skewed_and_no_click_comes_twice() -> None:
    # given, when
    clicks = synthesize(WorldSettings(user_count=2_000, item_count=500))

    # then
    counts = np.sort(np.bincount(clicks.item_rows, minlength=500))[::-1]
    assert counts[:50].sum() > 0.3 * counts.sum()
    pairs = set(zip(clicks.user_rows.tolist(), clicks.item_rows.tolist(), strict=True))
    assert len(pairs) == len(clicks.times_us)
    assert (np.diff(clicks.times_us) >= 0).all()


def test_what_is_held_out_is_newer_and_newcomers_are_unknown() -> None:
    # given, when
    data = make_synthetic_data(SMALL)

    # then
    first_us, second_us = (cut.timestamp() * 1_000_000 for cut in (data.first_cut, data.second_cut))
    times = np.asarray(data.table["timestamp"])
    users = np.array(data.table["user"].to_pylist(), object)
    assert sum(map(len, data.histories.values())) == (times < first_us).sum()
    assert data.arriving_users == set(users[(times >= first_us) & (times < second_us)])
    assert not set(data.newcomers) & set(data.histories)
    assert all(not set(items) & set(data.histories[user]) for user, items in data.held_out.items())
    assert data.held_out
    assert data.newcomers


def test_the_files_of_the_nights_hold_all_clicks_and_features(tmp_path: Path) -> None:
    # given
    data = make_synthetic_data(SMALL)

    # when
    data.write(tmp_path / "data")

    # then
    table = pq.read_table(tmp_path / "data" / INTERACTIONS_FILE)
    assert table.select(["user", "item"]) == data.table.select(["user", "item"])
    assert table.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert pq.read_table(tmp_path / "data/item_features.parquet").column_names == ["item", "category"]
    users = pq.read_table(tmp_path / "data/user_features.parquet")
    assert users.column_names == ["user", "country"]
    assert set(data.histories) <= set(users["user"].to_pylist())


def test_lines_with_a_test_file_are_held_out(tmp_path: Path) -> None:
    # given
    with gzip.open(tmp_path / "train.txt.gz", "wt") as file:
        file.write("007 1 2 3\n8 2 3\n")
    (tmp_path / "test.txt").write_text("007 4 5\n8 1\n")

    # when
    data = read_user_data(tmp_path, today=TODAY)

    # then: the first user appears only in the second night
    assert data.histories == {"007": ("1", "2", "3"), "8": ("2", "3")}
    assert data.held_out == {"007": ("4", "5"), "8": ("1",)}
    assert data.arriving_users == {"007"}
    assert data.second_cut == TODAY


def test_a_csv_with_times_is_split_by_time(tmp_path: Path) -> None:
    # given: an item per second for a hundred seconds
    rows = [f"u{second % 5},i{second},{1_700_000_000 + second}" for second in range(100)]
    (tmp_path / "clicks.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")

    # when
    data = read_user_data(tmp_path, today=TODAY)

    # then
    known = sum(map(len, data.histories.values()))
    assert known in range(88, 93)
    assert sum(map(len, data.held_out.values())) == 100 - known
    assert data.first_cut < data.second_cut


def test_without_times_the_last_item_of_every_user_is_held_out(tmp_path: Path) -> None:
    # given
    rows = [f"u{user},i{item}" for user in range(40) for item in range(4)] + ["few,i1", "few,i2"]
    (tmp_path / "clicks.csv").write_text("user,item\n" + "\n".join(rows) + "\n")

    # when
    data = read_user_data(tmp_path / "clicks.csv", today=TODAY)

    # then
    assert data.held_out == {f"u{user}": ("i3",) for user in range(40)}
    assert data.histories["few"] == ("i1", "i2")
    assert data.histories["u3"] == ("i0", "i1", "i2")
    assert data.arriving_users == {"u0", "u25"}


def test_a_folder_without_interactions_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=tmp_path.name):
        read_user_data(tmp_path, today=TODAY)


def test_recall_and_ndcg_by_hand() -> None:
    # given: a, b, c, d by popularity; a user is shown the most popular items that the user does not have
    histories = {"ann": ["a"], "bob": ["b", "c"], "cat": []}
    popular = ["a", "b", "c", "d"]
    lists = {user: [item for item in popular if item not in history][:2] for user, history in histories.items()}
    held_out = {"ann": ("c", "d", "e"), "bob": ("a",), "cat": ()}

    # when
    means = recall_and_ndcg(lists, held_out, list_length=2)

    # then: ann is shown b, c and hits at rank 2; bob is shown a, d and hits at rank 1; cat has nothing held out
    ann = (1 / math.log2(3)) / (1 + 1 / math.log2(3))
    assert means == pytest.approx({"recall": (1 / 3 + 1) / 2, "NDCG": (ann + 1.0) / 2})


def test_the_stream_repeats_itself_and_asks_mostly_for_popular_users() -> None:
    # given
    data = make_synthetic_data(SMALL)

    # when
    first_requests, two = ([*itertools.islice(RequestStream(data, seed=3), 400)] for _ in range(2))

    # then
    assert first_requests == two
    assert {request.request_kind for request in first_requests} == {
        "known_user", "batch", "exclude", "fresh", "similar", "tables", "stranger", "newcomer",
    }  # fmt: skip
    known_user_ids = [
        request.questions[0].entity_id for request in first_requests if request.request_kind == "known_user"
    ]
    assert max(known_user_ids.count(user_id) for user_id in set(known_user_ids)) > 20


GOOD = Answer(
    id="ann", table="user_topk", source=Source.L2, producer="batch", generation="g1", age_seconds=1.0,
    published_at="2026-01-31T12:00:00Z", items=("b", "c"), scores=np.array([2, 1], np.float32),
)  # fmt: skip
QUESTION = Question("user_topk", "ann", 2, frozenset({"x"}))


def judge() -> Judge:
    return Judge(history_by_user={"ann": ("a",)})


def test_a_good_answer_breaks_nothing() -> None:
    watching = judge()

    watching.request([QUESTION], [GOOD])
    watching.stop_if_broken()

    assert (watching.request_count, dict(watching.answers_by_source)) == (1, {"l2": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "bob"},
        {"source": "elsewhere"},
        {"source": Source.DEFAULT, "producer": "defaults"},
        {"items": ("b", "x")},
        {"items": ("a", "b")},
        {"items": ("b", "b")},
        {"scores": np.array([1, 2], np.float32)},
        {"items": ("b",), "scores": np.array([2], np.float32)},
        {"short": True},
        {"generation": "gone"},
    ],
)
def test_every_broken_rule_is_noticed(wrong: dict[str, Any]) -> None:
    # given
    watching = judge()

    # when
    watching.request([QUESTION], [dataclasses.replace(GOOD, **wrong)], {"gone"})

    # then
    with pytest.raises(InvariantViolation, match=r"^[12] violations, such as: "):
        watching.stop_if_broken()


def test_two_generations_in_one_request_are_noticed() -> None:
    # given
    watching, second_question = judge(), Question("user_topk", "bob", 2)

    # when
    second_answer = dataclasses.replace(GOOD, id="bob", generation="g2")
    watching.request([QUESTION, second_question], [GOOD, second_answer])

    # then
    assert "several generations" in watching.violations[0]


def test_two_answers_within_one_generation_are_noticed() -> None:
    # given
    watching, question_without_hidden = judge(), dataclasses.replace(QUESTION, hidden_items=frozenset())
    watching.request([question_without_hidden], [GOOD])

    # when
    watching.request([question_without_hidden], [dataclasses.replace(GOOD, items=("c", "b"))])

    # then
    assert "two different answers" in watching.violations[0]


METRICS = """
larder_entities_total{table="user_topk"} 3.0
larder_answers_total{source="l2",table="user_topk"} 2.0
larder_answers_total{source="default",table="user_topk"} 1.0
larder_misses_total{reason="negative",table="user_topk"} 1.0
larder_requests_total{route="POST /v1/lookup",status="200"} 3.0
"""


@pytest.mark.parametrize(("wrong", "count"), [
    ("", 0), ('larder_requests_total{route="GET /",status="503"} 1.0\n', 1),
    ('larder_entities_total{table="user_vector"} 1.0\n', 1),
    ('larder_misses_total{reason="other",table="user_topk"} 1.0\n', 1),
    ('larder_answers_total{source="l1",table="user_topk"} 1.0\n', 1),
])  # fmt: skip
def test_counters_that_do_not_add_up_are_reported(wrong: str, count: int) -> None:
    assert len(metric_contradictions(METRICS + wrong, {"l2": 2, "default": 1})) == count


def test_answers_that_nobody_counted_or_published_break_the_audit() -> None:
    watching = judge()
    watching.request([QUESTION], [GOOD])

    with pytest.raises(InvariantViolation, match=r"entities: 3, not 1; .*which never was live"):
        watching.audit_answers(METRICS, {"g2"})


def test_a_place_is_emptied_of_the_last_run_and_nothing_else(tmp_path: Path) -> None:
    # given
    with prepare_demo_folder(tmp_path) as home:
        write(home / "data" / "old", "x")
        write(tmp_path / "artifacts" / "mine", "y")

    # when
    with prepare_demo_folder(tmp_path) as reopened:
        # then
        assert not (reopened / "data").exists()
        assert (tmp_path / "artifacts" / "mine").exists()
        with pytest.raises(ConfigError, match="another demo"), prepare_demo_folder(tmp_path):
            pass


def test_the_written_settings_are_a_nights_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given
    data = make_synthetic_data(SMALL)
    monkeypatch.setenv("LARDER_TOKEN", "secret")

    # when
    write_settings(tmp_path, "demo-1", data)
    config = NightConfig.configured({}, tmp_path / "larder.toml")

    # then
    assert config.namespace == "demo-1"
    assert config.path(config.artifacts) == tmp_path / "artifacts"
    assert config.data_until == data.first_cut.isoformat()
    assert config.events.enabled
    assert config.sources.item_features == "data/item_features.parquet"
    assert process_environment(tmp_path, "redis://x")["LARDER_TOKEN"] == ""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
