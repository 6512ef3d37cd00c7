"""A table that readers may ask for goes missing, changes its kind, or has nothing to be compared with."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from cache.format.directory import Directory
from cache.format.ids import hash_ids
from precompute.config.settings import GateThresholds
from precompute.gates.evidence.candidate import FIRST_GENERATION_NOTE, UNREADABLE_LIVE_NOTE, Candidate
from precompute.gates.judge import INTEGRITY_RULES, OVERRIDABLE_RULES
from precompute.gates.rules.live import tables_of_live
from precompute.gates.rules.models import bundle, defaults, dimension
from precompute.gates.rules.records import coverage_of_live, items_of_live, short_lists
from precompute.sources.erasures import ErasedEntities

LIVE = {"lists": "topk", "likes": "topk", "vector": "vector"}


def judged(candidate_kinds: dict[str, str], live_kinds: dict[str, str] | None, unreadable: str | None = None) -> Any:
    def manifest(tables: dict[str, str]) -> Any:
        return SimpleNamespace(
            generation="live",
            tables={
                name: SimpleNamespace(
                    kind=kind, entity="item" if name == "likes" else "user", is_facet=name == "shelves"
                )
                for name, kind in tables.items()
            },
        )

    placeholder: Any = None
    live = None if live_kinds is None else manifest(live_kinds)
    candidate = Candidate(
        manifest(candidate_kinds), placeholder, placeholder, placeholder, live, placeholder, 10,
        prepared_evidence=cast(Any, object()), unreadable_live_generation=unreadable,
    )  # fmt: skip
    return tables_of_live(candidate)


@pytest.mark.parametrize(
    ("candidate_kinds", "wrong", "expected_note"),
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
    candidate_kinds: dict[str, str], wrong: int, expected_note: str
) -> None:
    measurement = judged(candidate_kinds, LIVE)
    assert (measurement.passed, measurement.measured_value, measurement.baseline_generation) == (
        not wrong,
        wrong,
        "live",
    )
    assert expected_note in measurement.note


@pytest.mark.parametrize(
    ("items", "passed", "threshold"), [(79, False, 0.8), (80, True, 0.8), (150, True, 0.8), (151, False, 1.5)]
)
def test_a_catalogue_that_shrinks_or_grows_by_much_is_judged(items: int, passed: bool, threshold: float) -> None:
    """An upstream filter that fails brings back what was withdrawn, and no lower bound sees it."""

    def manifest(count: int) -> Any:
        return SimpleNamespace(generation="live", entity_sets={"item": SimpleNamespace(count=count)})

    placeholder: Any = None
    candidate = Candidate(
        manifest(items), placeholder, placeholder, placeholder, manifest(100), GateThresholds(), 10,
        prepared_evidence=cast(Any, SimpleNamespace(live_items=None)),
    )  # fmt: skip

    measurement = items_of_live(candidate)

    assert (measurement.passed, measurement.measured_value, measurement.threshold) == (passed, items / 100, threshold)
    assert "100 before" in measurement.note and "items_of_live" in OVERRIDABLE_RULES


def test_the_first_lists_and_the_first_generation_are_compared_with_nothing() -> None:
    assert judged({"lists": "topk", "v": "vector"}, {"v": "vector"}).passed
    assert judged(LIVE, None).note == FIRST_GENERATION_NOTE


def test_a_live_generation_without_a_readable_manifest_is_no_first_one() -> None:
    measurement = judged(LIVE, None, unreadable="live")
    assert (
        not measurement.passed
        and measurement.note == UNREADABLE_LIVE_NOTE
        and measurement.baseline_generation == "live"
    )


def test_a_person_may_judge_otherwise() -> None:
    assert "tables_of_live" in OVERRIDABLE_RULES - INTEGRITY_RULES


def sized(**changes: Any) -> Any:
    """A generation of two items and a bundle, both with four numbers each, as the gate on dimensions sees it."""
    sizes = {"dims": 4, "vectors": 2 * 4 * 4, "model_index": 2 * 8, "vector": 4, "value": 3} | changes
    items = SimpleNamespace(
        count=2, dims=sizes["dims"], vectors=SimpleNamespace(size_bytes=sizes["vectors"]),
        model_index=SimpleNamespace(size_bytes=sizes["model_index"]),
    )  # fmt: skip

    def table(kind: str, width: int) -> Any:
        layout, producer = SimpleNamespace(width=width), SimpleNamespace(model="taste")
        return SimpleNamespace(kind=kind, layout=layout, producer=producer, labels=("a", "b", "c"))

    tables = {"taste": table("value", sizes["value"]), "user_vector": table("vector", sizes["vector"])}
    values = {"taste": SimpleNamespace(spec=SimpleNamespace(output_dims=3), labels=("a", "b", "c"))}
    return SimpleNamespace(
        manifest=SimpleNamespace(items=items, tables=tables),
        evidence=SimpleNamespace(bundle=SimpleNamespace(dims=4, value_models=values)),
    )


@pytest.mark.parametrize(
    ("changes", "value", "threshold", "note"),
    [
        ({"dims": 5}, 5, 4, "the item table"),
        ({"vectors": 2 * 5 * 4}, 5, 4, "the item vectors"),
        ({"model_index": 3 * 8}, 6, 4, "the items' model index"),
        ({"vector": 8}, 8, 4, "user_vector"),
        ({"value": 2}, 2, 3, "taste"),
    ],
)
def test_what_has_another_number_of_dimensions_is_named_with_both(
    changes: dict[str, int], value: float, threshold: float, note: str
) -> None:
    assert dimension(sized()).passed

    judged = dimension(sized(**changes))

    assert not judged.passed
    assert (judged.measured_value, judged.threshold, judged.note) == (value, threshold, note)


@pytest.mark.parametrize(
    ("items", "scores", "problem"),
    [
        (["a", "b"], [2.0, 1.0], ""),
        (["a", "b"], [1.0, 1.0], ""),
        (["a"], [2.0], "too few or too many"),
        (["a", "b"], [2.0], "too few or too many"),
        (["a", "x"], [2.0, 1.0], "unknown items"),
        (["a", "a"], [2.0, 1.0], "an item twice"),
        (["a", "b"], [1.0, 2.0], "scores that rise or are no numbers"),
        (["a", "b"], ["nan", 1.0], "scores that rise or are no numbers"),
    ],
)
def test_defaults_are_distinct_items_of_the_table_best_first(
    tmp_path: Path, items: list[str], scores: list[Any], problem: str
) -> None:
    # Given a table with lists of two, and the defaults that the night wrote
    (tmp_path / "defaults.json").write_bytes(orjson.dumps({"lists": {"items": items, "scores": scores}}))

    def ordinals_of(raws: Sequence[bytes]) -> list[int]:
        return [b"abc".find(raw) for raw in raws]

    table = SimpleNamespace(kind="topk", is_facet=False, layout=SimpleNamespace(width=2))
    candidate: Any = SimpleNamespace(
        root=tmp_path, manifest=SimpleNamespace(tables={"lists": table}),
        items=SimpleNamespace(count=3, ordinals_of=ordinals_of),
    )  # fmt: skip

    # When the gate judges them
    judged = defaults(candidate)

    # Then its verdict names the table and the fault
    assert (judged.passed, judged.note) == (not problem, "lists" if problem else "")
    assert judged.measured_value == (problem or 1)


def test_a_table_without_defaults_is_named(tmp_path: Path) -> None:
    (tmp_path / "defaults.json").write_bytes(b"{}")
    table = SimpleNamespace(kind="topk", is_facet=False, layout=SimpleNamespace(width=2))
    candidate: Any = SimpleNamespace(root=tmp_path, manifest=SimpleNamespace(tables={"lists": table}))

    judged = defaults(candidate)

    assert (judged.passed, judged.measured_value, judged.note) == (False, "none", "lists")


@pytest.mark.parametrize(("users", "passed"), [(4, True), (3, False)])
def test_erased_users_do_not_count_as_missing(users: int, passed: bool) -> None:
    # Given a live generation of ten users, six of whom were erased since, and an erased user who was never in it
    names = [f"user-{number}".encode() for number in range(10)]
    live_users = Directory(7, [0], [np.sort(hash_ids(names, 7))])
    erased = ErasedEntities(users=frozenset({*names[:6], b"stranger"}))

    def manifest(count: int) -> Any:
        return SimpleNamespace(generation="live", entity_sets={"user": SimpleNamespace(count=count)})

    placeholder: Any = None
    candidate = Candidate(
        manifest(users), placeholder, placeholder, placeholder, manifest(10), GateThresholds(coverage_of_live=1.0), 10,
        erased=erased, prepared_evidence=cast(Any, SimpleNamespace(live_user_directory=live_users)),
    )  # fmt: skip

    # When users are counted against it
    judged = coverage_of_live(candidate)

    # Then only the four other users have to be there
    assert (judged.passed, judged.measured_value) == (passed, users / 4)
    assert judged.note == f"{users} users, 4 before"


@pytest.mark.parametrize(("width", "shorter", "short_share"), [(5, 0, 0.0), (5, 1, 0.1), (2, 0, 0.0), (2, 1, 0.1)])
def test_a_list_of_an_item_is_short_if_it_lacks_another_item_that_fits(
    width: int, shorter: int, short_share: float
) -> None:
    # Given lists of similar items in a catalogue of three: a list can hold two others at most
    counts = np.zeros(width + 1, np.int64)
    counts[2], counts[1] = 10 - shorter, shorter
    table = SimpleNamespace(kind="topk", entity="item", layout=SimpleNamespace(width=width))
    scan = SimpleNamespace(table=table, lists_by_length=counts, record_count=10)
    evidence = SimpleNamespace(unfiltered_scans={"similar": scan}, seen_items=SimpleNamespace(indptr=np.array([0])))
    candidate: Any = SimpleNamespace(
        manifest=SimpleNamespace(facts={"short_lists": 0, "users_scored": 10}), evidence=evidence,
        items=SimpleNamespace(count=3), thresholds=GateThresholds(short_lists=0.05),
    )  # fmt: skip

    judged = short_lists(candidate)

    assert (judged.passed, judged.measured_value) == (not shorter, short_share)


def test_a_manifest_without_a_model_of_its_bundle_is_refused_by_the_models_name() -> None:
    model = SimpleNamespace(name="taste")
    pinned = SimpleNamespace(digest="d", models=[model])
    candidate: Any = SimpleNamespace(
        manifest=SimpleNamespace(bundle_digest="d", models={}), evidence=SimpleNamespace(bundle=pinned)
    )

    judged = bundle(candidate)

    assert (judged.passed, judged.measured_value, judged.threshold) == (False, "missing", "taste")
