"""What a load beside a reader is held against, from rates that are given."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bench.tools import load_rates
from tests.bench.tools.load_rates import REPEATS, Baselines


def baselines(monkeypatch: pytest.MonkeyPatch, flat: list[list[float]], sets: list[list[float]]) -> Baselines:
    """One list of short runs for each measurement."""

    def replay_runs(runs: list[list[float]]) -> Any:
        waiting: Iterator[float] = iter([rate for run in runs for rate in run])
        return lambda *arguments: next(waiting)

    assert {len(run) for run in flat + sets} == {REPEATS}
    monkeypatch.setattr(load_rates, "flat_out", replay_runs(flat))
    monkeypatch.setattr(load_rates, "set_pipeline", replay_runs(sets))
    unused_part: Any = None
    return Baselines("", unused_part, unused_part, unused_part, 1.0)


def test_a_stretch_is_held_against_what_was_measured_right_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    a_stall, a_leap = [100.0, 1.0, 100.0], [104.0, 104.0, 900.0]
    flat = [[300.0, 300.0, 300.0], a_stall, a_leap]
    sets = [[20.0, 20.0, 20.0], [10.0, 10.0, 10.0], [10.0, 10.0, 10.0]]
    base = baselines(monkeypatch, flat, sets)

    base.measure()
    for how in ("open", "closed"):
        base.measure()
        base.around(how)
    ratios = base.ratios("closed", [51.0])

    assert ratios["flat_out"].value == 51.0 / 102.0
    assert ratios["set_pipeline"].value == 51.0 / 10.0


def test_baselines_that_move_make_their_own_ratio_void_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [[100.0] * REPEATS, [106.0] * REPEATS]
    sets = [[10.0] * REPEATS, [10.4] * REPEATS]
    base = baselines(monkeypatch, flat, sets)

    base.measure()
    base.measure()
    base.around("closed")
    ratios = base.ratios("closed", [50.0])

    assert ratios["flat_out"].void and ratios["flat_out"].aa == 1.06
    assert not ratios["set_pipeline"].void
