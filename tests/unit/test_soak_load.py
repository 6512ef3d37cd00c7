"""The soak's judge of answers: a service that answers nothing but defaults does not pass."""

from typing import Any

import numpy as np
import pytest

from tests.integration.soak.mixed_load import SHARE_BY_KIND, MixedLoad

LISTS = {"g1": {"u": ("a", "b")}}


@pytest.fixture
def load() -> MixedLoad:
    return MixedLoad(["u"], {"a": "x", "b": "x"}, np.random.default_rng(0), LISTS)


def answer(**changes: Any) -> dict[str, Any]:
    answer_fields = {"id": "u", "table": "user_topk", "generation": "g1", "source": "l2", "producer": "batch"}
    return {**answer_fields, "items": ["a", "b"], **changes}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"source": "l1"}, None),
        ({"source": "default", "reason": "l2_timeout", "producer": None}, None),
        ({"producer": "live", "events": 1, "items": ["b"]}, None),
        ({"source": "default", "reason": "internal_error", "items": ["zz"]}, "internal error"),
        ({"producer": None, "items": ["zz"]}, "by None"),
        ({"producer": "live", "items": ["zz"]}, "by live"),
        ({"items": ["zz"]}, "not the list"),
        ({"source": "default"}, "without a reason"),
        ({"generation": "g9"}, "no generation"),
    ],
)
def test_what_nobody_should_get_is_wrong(load: MixedLoad, changes: dict[str, Any], complaint: str | None) -> None:
    load.judge("one", {}, answer(**changes))

    assert len(load.wrong) == (complaint is not None)
    assert complaint is None or complaint in load.wrong[0]


def test_every_kind_and_source_has_to_come(load: MixedLoad) -> None:
    assert len(load.missing()) == len(SHARE_BY_KIND) + 3
    load.kinds.update(SHARE_BY_KIND)
    for source in ("l1", "l2", "live"):
        load.judge("one", {}, answer(source=source, reason="fresh"))
    assert load.wrong == load.missing() == []


def test_defaults_are_for_strangers(load: MixedLoad) -> None:
    load.kinds.update(SHARE_BY_KIND)
    load.sources.update(("l1", "l2", "live"))
    for _ in range(9):
        load.judge("stranger", {}, answer(source="default", reason="not_in_generation", producer=None))
    load.judge("one", {}, answer())
    assert load.missing() == []
    load.judge("one", {}, answer(source="default", reason="l2_timeout", producer=None))
    assert load.missing() == ["1 of 2 answers about what the night knows are `default`"]
