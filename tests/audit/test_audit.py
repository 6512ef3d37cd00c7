"""The audit itself, at two lengths: five small seeds with the quick tests, ten minutes with the storm."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.audit.__main__ import run_audit
from tests.audit.report import Report

pytestmark = pytest.mark.xdist_group("audit")


@pytest.fixture
def seed() -> int:
    return random.SystemRandom().randrange(1_000_000)


def _text_of(report: Report) -> str:
    return "\n".join(report.lines())


def test_answers_keep_the_promises_of_the_documents_over_five_small_seeds(seed: int, tmp_path: Path) -> None:
    # given a shop that five seeds share, and its printed seed
    print(f"seed {seed}")

    # when random requests are sent while events, a block and a second night happen
    report = run_audit(["small"], seed, 50, tmp_path)

    # then no promise was broken
    assert report.is_clean, _text_of(report)
    assert report.counts["answers"] > 150


@pytest.mark.storm
def test_answers_keep_the_promises_of_the_documents_in_all_scenarios(seed: int, tmp_path: Path) -> None:
    # given ten minutes, and a printed seed
    print(f"seed {seed}")
    started_at = time.monotonic()

    # when all scenarios run
    report = run_audit(None, seed, 510, tmp_path, lanes=2)

    # then no promise was broken
    print(_text_of(report), f"{time.monotonic() - started_at:.0f} s", sep="\n")
    assert report.is_clean, _text_of(report)
