"""The state machine over random lives: the real release code, every interleaving, every crash, a Redis that forgets."""

import multiprocessing
import os
import random
import time

import pytest

from tests.defects import DEFECTS, planted
from tests.life import Broken, Life

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
QUICK, STORM, BLOCK = 2_000, 100_000, 250
LIVES_MAX = 20_000
"""Of a planted mistake: what must find it in fewer lives is a random life, not a special case."""


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


def live(count: int) -> str:
    """`count` lives on every core; what they saw."""
    started, moves = time.perf_counter(), 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        blocks = range(SEED * 1_000_000, SEED * 1_000_000 + count, BLOCK)
        for more, wrong in pool.imap_unordered(live_on, blocks):
            if wrong:
                pytest.fail(wrong)
            moves += more
    seconds = time.perf_counter() - started
    return f"seed {SEED}: {count:,} lives, {moves:,} moves of the pointer, {seconds:.0f} s"


def test_no_rule_breaks_in_a_random_life(capsys: pytest.CaptureFixture[str]) -> None:
    said = live(QUICK)
    with capsys.disabled():
        print(said)


@pytest.mark.storm
def test_no_rule_breaks_in_a_hundred_thousand_random_lives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = live(STORM)
    with capsys.disabled():
        print(said)


def test_a_life_is_the_same_whenever_its_seed_is() -> None:
    told = []
    for _ in range(2):
        life = Life(SEED)
        life.run()
        told.append(life.told)
    assert told[0] == told[1]


def lives_until_found(name: str) -> int:
    with planted(name):
        for number in range(LIVES_MAX):
            try:
                Life(number).run()
            except Broken:
                return number + 1
    pytest.fail(f"{LIVES_MAX} lives did not notice that {name}")


EASY = (
    "previous may be bad", "epoch follows the clock", "older data is published", "rolled back is superseded",
    "intents count as done", "just left is long ago", "retries publish again", "moves are not settled",
    "refused is published",
)  # fmt: skip


@pytest.mark.parametrize("name", EASY)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert lives_until_found(name) <= 1_000


@pytest.mark.storm
@pytest.mark.parametrize("name", sorted(set(DEFECTS) - set(EASY)))
def test_a_planted_mistake_that_takes_a_coincidence_is_found(name: str) -> None:
    assert lives_until_found(name) <= LIVES_MAX
