"""The base of a night: the newest verified generation of the same settings, of the same bundle if there is one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.control.states import GenerationState
from precompute.builds.build import settings_digest
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import NightConfig
from precompute.releases.release_log import Releases
from precompute.reuse import base
from precompute.reuse.base import (
    NO_VERIFIED_BASE_REASON,
    OTHER_BUNDLE_REASON,
    OTHER_SETTINGS_REASON,
    REUSE_OFF_REASON,
    VERIFIED_STATES,
    BaseGeneration,
    choose_base,
)

CONFIG = NightConfig()
OWN_BUNDLE = cast(Bundle, SimpleNamespace(digest="ours"))
MAKING = "20260131T000000Z-000000000000"


def name_of(number: int) -> str:
    return f"202601{number:02d}T000000Z-{number:012x}"


states = st.sampled_from([None, *GenerationState])
StoredGeneration = tuple[GenerationState | None, GenerationState | None, bool, bool, bool]
generations = st.lists(st.tuples(states, states, st.booleans(), st.booleans(), st.booleans()), max_size=8)
"""Of each: its state by the ledger, and by its row; whether it can be read, and is of the same settings and bundle."""


@given(stored_generations=generations, making=st.integers(0, 9))
def test_the_base_is_the_newest_that_fits(stored_generations: list[StoredGeneration], making: int) -> None:
    named = {name_of(number): stored_generation for number, stored_generation in enumerate(stored_generations, 1)}
    reads = {
        name: (None, {
            "settings": settings_digest(CONFIG) if settings else "others",
            "bundle_digest": "ours" if bundle else "another",
        }, SimpleNamespace(generation=name))
        for name, (_, _, readable, settings, bundle) in named.items() if readable
    }  # fmt: skip
    releases = SimpleNamespace(
        ledger=lambda: SimpleNamespace(state=lambda name: named[name][0]),
        control=SimpleNamespace(
            rows=lambda: {
                name: SimpleNamespace(state=stored_generation[1])
                for name, stored_generation in named.items() if stored_generation[1] is not None
            }
        ),
        store=SimpleNamespace(names=lambda folder: {*named, "not-a-generation"}),
    )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_read_generation", lambda config, name: reads.get(name))
        base_generation, no_base_reason = choose_base(
            cast(Releases, releases), CONFIG, OWN_BUNDLE, generation_being_made=name_of(making)
        )  # fmt: skip

    verified = [
        name for name, (ledger_state, row, *_) in sorted(named.items(), reverse=True)
        if (ledger_state or row) in VERIFIED_STATES and name != name_of(making)
    ]  # fmt: skip
    fitting = [name for name in verified if named[name][2] and named[name][3]]
    same_bundle_names = [name for name in fitting if named[name][4]]
    if same_bundle_names:
        assert base_generation is not None and (base_generation.generation, base_generation.has_lists) == (
            same_bundle_names[0],
            True,
        )
        assert no_base_reason == ""
    elif fitting:
        assert base_generation is not None and (base_generation.generation, base_generation.has_lists) == (
            fitting[0],
            False,
        )
        assert no_base_reason == OTHER_BUNDLE_REASON
    else:
        assert base_generation is None and no_base_reason == (
            OTHER_SETTINGS_REASON if verified else NO_VERIFIED_BASE_REASON
        )


def test_nothing_is_looked_at_where_it_is_off() -> None:
    base_and_reason = choose_base(
        cast(Releases, None), replace(CONFIG, reuse="off"), OWN_BUNDLE, generation_being_made=MAKING
    )

    assert base_and_reason == (None, REUSE_OFF_REASON)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"history_limit": 7}, False), ({"shards": 3}, False), ({"page_bytes": 8192}, False),
        ({"tables": {"user_topk": CONFIG.tables["user_topk"]}}, False), ({"namespace": "other"}, False),
        ({"threads": 3}, True), ({"keep": 4}, True), ({"reuse": "off"}, True),
    ],
)  # fmt: skip
def test_settings_that_decide_what_is_stored_make_another_digest(changes: dict[str, Any], is_same: bool) -> None:
    assert (settings_digest(replace(CONFIG, **changes)) == settings_digest(CONFIG)) is is_same


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"user": ("digest", {"dims": 4})}, True),
        ({"user": ("another", {"dims": 4})}, False),
        ({"user": ("digest", {"dims": 5})}, False),
        ({"item": ("digest", {"dims": 4})}, False),
        ({}, False),
    ],
)
def test_a_base_has_a_model_of_the_same_bytes_that_is_fed_in_the_same_way(
    models: dict[str, tuple[str, dict[str, int]]], expected: bool
) -> None:
    # Given a base whose bundle had these models
    base_models = {name: SimpleNamespace(digest=digest, spec=spec) for name, (digest, spec) in models.items()}
    earlier = BaseGeneration(
        cast(Any, None), cast(Any, {}), cast(Any, SimpleNamespace(models=base_models)), has_lists=True
    )

    # When this night has a model of that name
    spec = SimpleNamespace(to_json=lambda: {"dims": 4})
    model = cast(BundleModel, SimpleNamespace(name="user", digest="digest", spec=spec))

    # Then it counts as the base's only if both digest and spec agree
    assert earlier.has_model(model) is expected
