"""The state machine over random lives: the real release code, every interleaving, every crash, a Redis that forgets."""

import multiprocessing
import os
import random
import time

import pytest

from tests.defects import BIASES, DEFECTS, planted
from tests.life import Bias, Broken, Life

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
QUICK, STORM, BLOCK = 750, 100_000, 125
LIVES_MAX = 10_000
"""Until a planted mistake is found: the same ones in every run."""

FIRST = {
    "a roll back may be forgotten": 286,
    "a roll back may go forward": 414,
    "canaries are not protected": 1_759,
    "gates are not looked at": 553,
    "old pages come back": 706,
    "pointer is not compared": 288,
    "refused is published": 338,
    "retries publish again": 270,
}
"""Life that first showed a mistake, where that took long; the search goes on from there where it no longer does."""

RARE = {"rows are not looked at"}
"""A mistake that takes thousands of lives to show."""


def live_on(first: int) -> tuple[int, str]:
    """A block of lives; the pointer moves in them, and what went wrong first."""
    moves = 0
    for seed in range(first, first + BLOCK):
        life = Life(seed)
        try:
            life.run()
        except Broken as error:
            return moves, str(error)
        moves += life.moves
    return moves, ""


def live(count: int, first: int) -> str:
    """`count` lives from this seed on, on every core; what they saw."""
    started, moves = time.perf_counter(), 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        blocks = range(first, first + count, BLOCK)
        for more, wrong in pool.imap_unordered(live_on, blocks):
            if wrong:
                pytest.fail(wrong)
            moves += more
    seconds = time.perf_counter() - started
    return f"from seed {first}: {count:,} lives, {moves:,} moves of the pointer, {seconds:.0f} s"


def test_no_rule_breaks_in_a_random_life(capsys: pytest.CaptureFixture[str]) -> None:
    run_summary = live(QUICK, 0)  # the same ones in every run; the long count looks for new ones
    with capsys.disabled():
        print(run_summary)


def test_a_pin_that_is_refused_leaves_an_earlier_one() -> None:
    # With this seed, a pin is repeated while a retirement that saw the first pin withdraws its own mark.
    Life(4242047211).run()


def test_a_restore_gives_way_to_a_publish_that_is_recorded_as_done_meanwhile() -> None:
    # With this seed, Redis is lost behind the move of a publish, and a restore has read the records before it ends.
    Life(285836087064352).run()


@pytest.mark.storm
def test_no_rule_breaks_in_a_hundred_thousand_random_lives(capsys: pytest.CaptureFixture[str]) -> None:
    run_summary = live(STORM, SEED * 1_000_000)
    with capsys.disabled():
        print(run_summary)


def test_a_life_is_the_same_whenever_its_seed_is() -> None:
    step_logs = []
    for _ in range(2):
        life = Life(SEED)
        life.run()
        step_logs.append(life.log_lines)
    assert step_logs[0] == step_logs[1]


def find(name: str) -> None:
    bias = BIASES.get(name, Bias())
    with planted(name):
        first = FIRST.get(name, 0)
        for number in range(first, first + LIVES_MAX):
            try:
                Life(number, bias).run()
            except Broken:
                break
        else:
            pytest.fail(f"{LIVES_MAX} lives did not notice that {name}")
    Life(number, bias).run()  # it was the mistake that broke it


@pytest.mark.parametrize(
    "name", [pytest.param(defect, marks=[pytest.mark.slow] if defect in RARE else []) for defect in sorted(DEFECTS)]
)
def test_a_planted_mistake_is_found(name: str) -> None:
    find(name)
