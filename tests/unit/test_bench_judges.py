"""The judges of L1's policy: traces that others published, and libCacheSim where it is installed."""

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import advisor, policies
from tests.bench.judges.cachesim import judge
from tests.bench.judges.environment import ABSENT, is_there
from tests.bench.judges.public_traces import TRACES, missing, numbered, text
from tests.bench.policies import l1_hit_ratio
from tests.bench.tools.harness import Options, Report
from tests.bench.tools.policy import POLICIES
from tests.bench.tools.topk_cases import DATA
from tests.bench.tools.traces import gowalla, lru_hit_ratio, zipf

judged = pytest.mark.skipif(not is_there(), reason=ABSENT)
SPRITE = next(trace for trace in TRACES if trace.name == "sprite")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where traces are looked for."""
    monkeypatch.setenv(DATA, str(tmp_path))
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces"


def test_ten_traces_are_named_once_each_with_where_they_are_from() -> None:
    assert len({trace.name for trace in TRACES}) == len({trace.sha256 for trace in TRACES}) == 10
    assert SPRITE.where().startswith("ben-manes/caffeine@") and len(missing()) <= 10


def test_a_trace_with_the_published_bytes_is_read_in_its_order(folder: Path) -> None:
    raw = b"70\n70\n*\n9\n70\n"
    trace = replace(SPRITE, file="x/some.txt", sha256=hashlib.sha256(raw).hexdigest())
    (folder / "some.txt").write_bytes(raw)

    assert trace.keys().tolist() == [0, 0, 1, 0]


def test_a_trace_with_other_bytes_is_an_error_that_names_both_checksums(folder: Path) -> None:
    (folder / "sprite.trace.gz").write_bytes(b"other")

    with pytest.raises(ValueError, match=SPRITE.sha256):
        SPRITE.keys()


def test_a_trace_that_is_not_here_is_said_with_its_place(folder: Path) -> None:
    assert len(missing()) == 10 and SPRITE.where() in " ".join(missing())
    with pytest.raises(FileNotFoundError, match="sprite"):
        SPRITE.keys()


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_keys_are_numbered_by_first_appearance(names: list[int]) -> None:
    order = list(dict.fromkeys(names))

    assert numbered(np.array(names, np.int64)).tolist() == [order.index(name) for name in names]


def test_a_column_of_a_text_is_its_keys() -> None:
    assert text(b"1 20 300\n2 21 300\n", column=1).tolist() == [20, 21]


def test_check_ins_become_requests_of_their_users_in_sessions(tmp_path: Path) -> None:
    file = tmp_path / "train.txt.gz"
    rows = {user: list(range(user, user + 30)) for user in range(200)}
    with gzip.open(file, "wt") as lines:
        lines.writelines(f"{user} {' '.join(map(str, items))}\n" for user, items in rows.items())

    requests = gowalla(file)

    assert np.bincount(requests["users"]).tolist() == [30] * 200
    pairs = set(zip(requests["users"].tolist(), requests["places"].tolist(), strict=True))
    assert pairs == {(user, item) for user, items in rows.items() for item in items}
    near = np.mean([user in requests["users"][at + 1 : at + 40] for at, user in enumerate(requests["users"])])
    assert near > 0.5  # in a drawn order it would be 0.18


@judged
@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_references_hit_as_often_as_libcachesim(policy: str) -> None:
    keys, capacities = zipf(2_000, 20_000), [1, 20, 200, 1_000]
    name = {"lru": "LRU", "sieve": "Sieve"}[policy]

    _, hit_ratios_by_policy = judge(keys, capacities, (name,))

    def ratio(kind: Callable[..., object], capacity: int) -> float:
        get = POLICIES[policy](capacity).get
        return sum(map(get, keys.tolist())) / len(keys)

    assert hit_ratios_by_policy[name] == pytest.approx(
        [ratio(POLICIES[policy], capacity) for capacity in capacities], abs=1e-9
    )


@judged
def test_l1_finds_what_libcachesims_lru_of_as_many_records_finds() -> None:
    keys = zipf(2_000, 20_000)

    hit_ratio, held_records = l1_hit_ratio(keys, 200 * 1_200)

    assert 100 < held_records < 250
    _, judges = judge(keys, (held_records,), ("LRU",))
    assert hit_ratio == pytest.approx(judges["LRU"][0], abs=0.01)
    assert judges["LRU"][0] == pytest.approx(lru_hit_ratio(keys.tolist(), None, held_records), abs=1e-9)


@judged
def test_with_every_key_sampled_the_advisor_says_what_libcachesims_lru_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = "\n".join(map(str, zipf(2_000, 10_000))).encode()
    (folder / "some.txt").write_bytes(raw)
    trace = replace(SPRITE, file="some.txt", sha256=hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(advisor, "TRACES", (trace,))
    report = Report("advisor")

    advisor.public(report, Options(json=True, quick=True, rounds=5))

    assert {name: round(ratio.value, 6) for name, ratio in report.ratios.items()} == {
        f"max_error_points_public{size}{more}": 0.0 for size in ("", "_small") for more in ("", "_quarter")
    }
    assert report.promises.keys() <= report.ratios.keys()


@judged
def test_policies_are_held_against_lru_by_misses_and_by_points() -> None:
    report = Report("policies")

    policies.by_judge(report, "zipf", zipf(500, 5_000))

    names = {f"zipf.{name}{more}" for name in ("Sieve", "S3FIFO", "WTinyLFU", "ARC") for more in ("", "_points")}
    assert report.ratios.keys() == names
    assert report.ratios["zipf.S3FIFO_points"].value > 1.0  # independent draws are what LRU is worst at
    assert report.ratios["zipf.S3FIFO"].value < 1.0
