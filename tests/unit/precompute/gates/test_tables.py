"""A table that readers may ask for goes missing, changes its kind, or has nothing to be compared with."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from precompute.config.settings import GateThresholds
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.verdict import FIRST, UNREADABLE
from precompute.gates.judge import INTEGRITY, OVERRIDABLE
from precompute.gates.rules.entities import items_of_live
from precompute.gates.rules.live import tables_of_live

LIVE = {"lists": "topk", "likes": "topk", "vector": "vector"}


def judged(
    now: dict[str, str], before: dict[str, str] | None, unreadable: str | None = None
) -> Any:
    def manifest(tables: dict[str, str]) -> Any:
        return SimpleNamespace(
            generation="live",
            tables={
                name: SimpleNamespace(
                    kind=kind,
                    entity="item" if name == "likes" else "user",
                    is_facet=name == "shelves",
                )
                for name, kind in tables.items()
            },
        )

    nothing: Any = None
    live = None if before is None else manifest(before)
    candidate = Candidate(
        manifest(now), nothing, nothing, nothing, live, nothing, 10,
        given=cast(Any, object()), unreadable=unreadable,
    )  # fmt: skip
    return tables_of_live(candidate)


@pytest.mark.parametrize(
    ("now", "wrong", "said"),
    [
        (LIVE, 0, ""),
        (LIVE | {"scores": "value"}, 0, ""),
        ({"lists": "topk", "likes": "topk"}, 1, "vector is gone"),
        ({"lists": "topk", "likes": "topk", "vector": "value"}, 1, "another kind"),
        ({"list": "topk", "likes": "topk", "vector": "vector"}, 2, "lists is gone"),
        (LIVE | {"more": "topk"}, 1, "more has no lists"),
        (LIVE | {"shelves": "topk"}, 0, ""),
    ],
)
def test_tables_of_the_live_generation_are_missed(
    now: dict[str, str], wrong: int, said: str
) -> None:
    found = judged(now, LIVE)
    assert (found.passed, found.value, found.baseline) == (not wrong, wrong, "live")
    assert said in found.note


@pytest.mark.parametrize(
    ("items", "passed", "threshold"),
    [(79, False, 0.8), (80, True, 0.8), (150, True, 0.8), (151, False, 1.5)],
)
def test_a_catalogue_that_shrinks_or_grows_by_much_is_judged(
    items: int, passed: bool, threshold: float
) -> None:
    """An upstream filter that fails brings back what was withdrawn, and no lower bound sees it."""

    def manifest(count: int) -> Any:
        return SimpleNamespace(
            generation="live", entity_sets={"item": SimpleNamespace(count=count)}
        )

    nothing: Any = None
    candidate = Candidate(
        manifest(items), nothing, nothing, nothing, manifest(100), GateThresholds(), 10,
        given=cast(Any, SimpleNamespace(live_items=None)),
    )  # fmt: skip

    found = items_of_live(candidate)

    assert (found.passed, found.value, found.threshold) == (passed, items / 100, threshold)
    assert "100 before" in found.note and "items_of_live" in OVERRIDABLE


def test_the_first_lists_and_the_first_generation_are_compared_with_nothing() -> None:
    assert judged({"lists": "topk", "v": "vector"}, {"v": "vector"}).passed
    assert judged(LIVE, None).note == FIRST


def test_a_live_generation_without_a_readable_manifest_is_no_first_one() -> None:
    found = judged(LIVE, None, unreadable="live")
    assert not found.passed and found.note == UNREADABLE and found.baseline == "live"


def test_a_person_may_judge_otherwise() -> None:
    assert "tables_of_live" in OVERRIDABLE - INTEGRITY
