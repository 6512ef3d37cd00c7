"""The position that a retry of a night goes on with: that of an unfinished generation whose files are still there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.config.events import EventsConfig
from cache.control.states import GenerationState
from precompute.builds.build import Build, settings_digest
from precompute.builds.reports import BEGIN_REPORT, BeginReport
from precompute.config.settings import NightConfig
from precompute.events import taking

CUT = "2026-01-31T00:00:00Z"
OLDER, NEWER = "20260131T000000Z-0123456789ab", "20260131T000000Z-f123456789ab"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NightConfig:
    """Settings with a store that has no file of events, all of whose generations are unfinished."""
    night_config = NightConfig(namespace="taking", artifacts=str(tmp_path), events=EventsConfig(enabled=True))

    @contextmanager
    def opened(_: NightConfig) -> Iterator[Any]:
        yield SimpleNamespace(store=night_config.store(), state=lambda _: GenerationState.BEGUN)

    monkeypatch.setattr(taking, "open_releases", opened)
    monkeypatch.setattr(taking, "all_input_files", lambda _: [])
    return night_config


def begun(config: NightConfig, generations: Mapping[str, str]) -> None:
    """Generations that began with the events up to positions."""
    for generation, until_position in generations.items():
        report = {
            "cut": CUT, "settings": settings_digest(config), "events": {"until": until_position}, "inputs": [],
        }  # fmt: skip
        Build(config, config.store(), generation).report(BEGIN_REPORT, cast(BeginReport, report))


def test_a_generation_whose_files_were_merged_meanwhile_is_not_gone_on_with(config: NightConfig) -> None:
    begun(config, {NEWER: "5-0"})  # no file ends there any more

    assert taking._unfinished_until(config, CUT) is None

    begun(config, {OLDER: "0-0"})
    assert taking._unfinished_until(config, CUT) == "0-0"
    assert taking._unfinished_until(config, None) is None
