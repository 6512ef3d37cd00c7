"""Users whom the tower gave no vector: none is searched for, and each keeps its place."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.errors import BundleError
from cache.model.tower import Histories
from cache.records import NO_ITEM
from cache.topk.topk import Scorer
from precompute.scoring.input_samples import _select_finite
from precompute.scoring.shard_work import ShardWork

K = 7


@pytest.mark.parametrize("unanswered", [[], [0, 3, 9], list(range(10))], ids=["none", "some", "all"])
def test_lists_are_made_for_those_who_have_a_vector(monkeypatch: pytest.MonkeyPatch, unanswered: list[int]) -> None:
    rng = np.random.default_rng(1)
    users = rng.standard_normal((10, 8)).astype(np.float32)
    users[unanswered] = np.nan
    scorer = Scorer.of(rng.standard_normal((50, 8)).astype(np.float32), "inner_product")
    user_counts: list[int] = []

    def record_top(users: Any, *search_arguments: Any, **more: Any) -> Any:
        user_counts.append(len(users))
        return scorer.top(users, *search_arguments, **more)

    seen_items = Histories.of([rng.choice(50, row, replace=False) for row in range(10)])
    chunk: Any = SimpleNamespace(
        user_ids=range(10), outputs_by_model={"user_tower": users}, lists_by_table={}, seen_items=seen_items,
        is_answered_by_model={"user_tower": np.isfinite(users).all(axis=1)},
    )  # fmt: skip
    work = object.__new__(ShardWork)
    for name, value in {
        "build": SimpleNamespace(config=SimpleNamespace(threads=1)), "allowed_masks": {},
        "scoring_device": SimpleNamespace(compute_slots=threading.Lock()), "tables": {"top": SimpleNamespace(k=K)},
    }.items():  # fmt: skip
        object.__setattr__(work, name, value)
    monkeypatch.setattr(ShardWork, "add_stage_time", lambda *_: nullcontext())
    monkeypatch.setattr(ShardWork, "_scorers", lambda _: {"top": SimpleNamespace(top=record_top)})

    ordinals, scores = work.add_lists(chunk).lists_by_table["top"]

    expected_lists = scorer.top(np.nan_to_num(users), K, seen_items)
    answered = np.setdiff1d(np.arange(10), unanswered)
    assert user_counts == [len(answered)]
    assert np.array_equal(ordinals[answered], expected_lists[0][answered])
    assert np.array_equal(scores[answered], expected_lists[1][answered])
    assert (ordinals[unanswered] == NO_ITEM).all() and (scores[unanswered] == 0).all()


def test_a_model_without_a_finite_output_is_named_before_its_int8_form_is_made() -> None:
    tower: Any = SimpleNamespace(
        name="risk.fp32.onnx", run=lambda inputs: np.full((len(inputs["age"]), 2), np.nan, np.float32)
    )

    with pytest.raises(BundleError, match=r"no output of risk\.fp32\.onnx is finite for any of 5"):
        _select_finite(tower, {"age": np.zeros(5)}, None)
