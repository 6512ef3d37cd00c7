"""The fact of a night's copies: its own figures, and those of the nights that it follows from."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.reuse import REUSE_FACT, REUSE_NIGHTS_MAX
from precompute.builds.build import Build
from precompute.builds.reports import NO_BASE_ENTRY, ShardReport
from precompute.reuse import reuse_fact
from precompute.reuse.reuse_fact import MEASURED_USERS, build_reuse_fact


def made(base: str | None) -> Build:
    """A build whose `begin` chose this base."""
    reports = {"begin": {"base": {**NO_BASE_ENTRY, "generation": base}}, "embed_items": {"copied": 5}}
    return cast(Build, SimpleNamespace(need_report=reports.__getitem__, store=None))


def shard(copied: int, computed: int, seconds: float) -> ShardReport:
    """Report of a shard's step."""
    report = {
        "users": {"reasons": {"copied": copied, "inputs": computed}, "seconds": {"tower": seconds, "topk": seconds}},
        "items": {"copied": 3},
    }
    return cast(ShardReport, report)


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fact of the base, as its manifest has it."""
    fact: dict[str, Any] = {"user_s": 0.25, "nights": [{"users": {"copied": 1}, "spared_s": 0.5}]}
    manifest = SimpleNamespace(facts={REUSE_FACT: fact})
    monkeypatch.setattr(reuse_fact, "read_manifest", lambda _store, _generation: manifest)
    return fact


def test_a_night_stands_behind_those_of_its_base(earlier: dict[str, Any]) -> None:
    fact = build_reuse_fact(made("g"), [shard(10, MEASURED_USERS, 8.0), shard(4, 0, 0.0)])

    assert fact["nights"][0] == {"users": {"copied": 1}, "spared_s": 0.5}
    assert len(fact["nights"]) == 2
    assert fact["nights"][1]["users"]["copied"] == 14 and fact["users"]["inputs"] == MEASURED_USERS
    assert fact["items"] == 6 and fact["item_vectors"] == 5


def test_only_the_last_nights_are_kept(earlier: dict[str, Any]) -> None:
    earlier["nights"] = [{"users": {}, "spared_s": float(number)} for number in range(REUSE_NIGHTS_MAX)]

    nights = build_reuse_fact(made("g"), [shard(0, 1, 0.0)])["nights"]

    assert len(nights) == REUSE_NIGHTS_MAX and [night["spared_s"] for night in nights[:2]] == [1.0, 2.0]


@pytest.mark.parametrize(("computed", "user_s"), [(MEASURED_USERS, 16.0 / MEASURED_USERS), (MEASURED_USERS - 1, 0.25)])
def test_few_computed_users_say_nothing_of_the_time_that_copies_spare(
    earlier: dict[str, Any], computed: int, user_s: float
) -> None:
    # Given a base whose users took a quarter of a second each, and a night that spent 16 s
    fact = build_reuse_fact(made("g"), [shard(10, computed, 8.0)])

    # Then the night's own time per user counts only if it computed enough users
    assert fact["user_s"] == pytest.approx(user_s)
    assert fact["spared_s"] == pytest.approx(10 * user_s)


def test_a_night_without_a_base_measures_itself() -> None:
    fact = build_reuse_fact(made(None), [shard(0, 4, 1.0)])

    assert fact["base"] is None and fact["user_s"] == 0.5 and len(fact["nights"]) == 1
