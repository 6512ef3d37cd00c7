"""The state of a generation, where releases and the registry's row say different things."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.errors import Conflict
from precompute.releases.release_log import generation_state
from precompute.releases.replication import confirm_pages

GENERATION = "20260131T000000Z-000000000001"


@pytest.mark.parametrize(
    ("proven", "row", "state"),
    [
        (None, None, None),
        (None, GenerationState.LOADED, GenerationState.LOADED),
        (None, GenerationState.SUPERSEDED, GenerationState.SUPERSEDED),
        (GenerationState.LIVE, None, GenerationState.LIVE),
        (GenerationState.LIVE, GenerationState.RETIRED, GenerationState.LIVE),
        (GenerationState.LIVE, GenerationState.VERIFIED, GenerationState.LIVE),
        (GenerationState.SUPERSEDED, GenerationState.RETIRED, GenerationState.RETIRED),
        (GenerationState.REFUSED, GenerationState.LOADED, GenerationState.REFUSED),
        (GenerationState.ROLLED_BACK, GenerationState.VERIFIED, GenerationState.ROLLED_BACK),
        (GenerationState.VERIFIED, GenerationState.LOADED, GenerationState.LOADED),
        (GenerationState.VERIFIED, GenerationState.REFUSED, GenerationState.REFUSED),
        (GenerationState.VERIFIED, GenerationState.LIVE, GenerationState.VERIFIED),
        (GenerationState.VERIFIED, GenerationState.SUPERSEDED, GenerationState.VERIFIED),
    ],
)
def test_a_row_says_more_than_releases_only_on_the_way_to_the_next_one(
    proven: GenerationState | None, row: GenerationState | None, state: GenerationState | None
) -> None:
    ledger: Any = SimpleNamespace(state={GENERATION: proven}.get)

    assert generation_state(GENERATION, ledger, None if row is None else RegistryRow(row, 0.0)) is state


def test_nothing_is_confirmed_for_what_is_no_generation() -> None:
    with pytest.raises(Conflict, match="not a generation id") as refused:
        confirm_pages(cast(Any, None), "../live", None, timeout_s=1.0)

    assert refused.value.details == {"generation": "../live"}
