"""Random simulations of the serving side: no rule breaks, a seed repeats itself, and planted mistakes are found."""

import multiprocessing
import os
import random
import time
from itertools import zip_longest

import pytest

from tests.simulation.defects import BIASES, DEFECTS, planted
from tests.simulation.leftovers import Broken
from tests.simulation.scenarios import Bias, scenario
from tests.simulation.shrinking import broken, format_failure, shrunk
from tests.simulation.simulation import START, Simulation, installed

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
QUICK, STORM, BLOCK = 60, 20_000, 5
SEEDS_MAX = 2_000
"""Until a planted mistake is found, from seed 0 on: the same ones in every run."""

STEPS_MAX = 10
"""Steps that a failure is shrunk to at most."""

SELDOM = {
    "a blocklist misses what is loading",
    "a failed batch keeps its worker",
    "a slow load holds up the next look",
    "an arm that cannot obey answers",
    "looks at experiments wait until arms have started",
    "requests under way fail when their experiment stops",
    "flights forget the input",
    "previous is whatever arrives last",
    "the breaker never closes",
    "an older blocklist is taken",
    "an older epoch is followed",
    "nobody says that redis is gone",
    "ready answers outlive their snapshot",
    "recent names are read by a thread",
    "what is degraded stays so",
    "who leaves takes the flight along",
}
"""Mistakes that take more than a few seconds to show."""


def run_from(first: int) -> tuple[float, str]:
    """Run a block of seeds; return the virtual seconds and the first failure, shrunk."""
    virtual_s = 0.0
    with installed():
        for seed in range(first, first + BLOCK):
            simulation = Simulation(seed, scenario(seed))
            try:
                simulation.run()
            except Broken:
                return virtual_s, format_failure(seed, shrunk(seed, simulation.steps))
            virtual_s += simulation.loop.time() - START
    return virtual_s, ""


def run(count: int, first: int) -> str:
    """Run `count` seeds from this one on, on every core; return their results."""
    started_at, virtual_s = time.perf_counter(), 0.0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for more_s, wrong in pool.imap_unordered(run_from, range(first, first + count, BLOCK)):
            if wrong:
                pytest.fail(wrong)
            virtual_s += more_s
    seconds = time.perf_counter() - started_at
    return (
        f"from seed {first}: {count:,} simulations, {virtual_s / 3600:,.1f} hours in {seconds:.0f} s, "
        f"{virtual_s / seconds:,.0f} times as fast as a clock"
    )


def test_no_rule_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(QUICK, 0)  # the same ones in every run; the long count looks for new ones
    with capsys.disabled():
        print(summary)


@pytest.mark.storm
def test_no_rule_breaks_in_twenty_thousand_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(STORM, SEED * 1_000_000)
    with capsys.disabled():
        print(summary)


def lines_of(seed: int) -> list[str]:
    """Return what happens under a seed, line by line."""
    with installed():
        simulation = Simulation(seed, scenario(seed))
        simulation.run()
        return simulation.lines


def test_a_seed_repeats_itself_in_any_process() -> None:
    print(f"seed {SEED} (LARDER_SEED repeats it)")
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        first, second = pool.map(lines_of, [SEED, SEED], chunksize=1)
    for other in second, lines_of(SEED), lines_of(SEED):  # whatever a process remembers
        differences = [pair for pair in zip_longest(first, other) if pair[0] != pair[1]]
        assert not differences, differences[:3]


def find_seed(name: str) -> int:
    """Return the first seed under which a planted defect shows, and nothing breaks without the defect."""
    bias = BIASES.get(name, Bias())
    with installed():
        for seed in range(SEEDS_MAX):
            steps = scenario(seed, bias)
            try:
                with planted(name):
                    Simulation(seed, steps).run()
            except Broken:
                Simulation(seed, steps).run()  # it was the mistake that broke it
                return seed
    pytest.fail(f"{SEEDS_MAX} simulations did not notice that {name}")


@pytest.mark.parametrize(
    "name", [pytest.param(defect, marks=[pytest.mark.slow] if defect in SELDOM else []) for defect in sorted(DEFECTS)]
)
def test_a_planted_mistake_is_found(name: str) -> None:
    print(f"{name}: seed {find_seed(name)}")


@pytest.mark.storm
@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_planted_mistake_is_reported_in_few_steps(name: str) -> None:
    seed = find_seed(name)
    with installed(), planted(name):
        report = shrunk(seed, scenario(seed, BIASES.get(name, Bias())))
    print(format_failure(seed, report))
    assert len(report.steps) <= STEPS_MAX
    with installed(), planted(name):  # nothing that the plant remembers of other simulations broke the rule
        assert broken(report.luck, report.steps) is not None
