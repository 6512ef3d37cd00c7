"""The audit finds wrong answers that are planted into the product, without knowing of them."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_answers.plants import PLANTS, Plant

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache", "precompute", "serving", "dags", "infra")
AT_LEAST = 8
MINUTES = 9.0


def planted_tree(plant: Plant, folder: Path) -> Path:
    """Copy the product's packages into `folder`, with the plant in them; return `folder`."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    plant.put_into(folder)
    return folder


def audit(tree: Path, seed: int) -> subprocess.CompletedProcess[str]:
    """Run the audit on the product in `tree`: its programs take their packages from there."""
    command = [sys.executable, "-m", "tests.audit", "--first", "--lanes", "2"]
    command += ["--seed", str(seed), "--minutes", str(MINUTES)]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=False, timeout=60 * MINUTES + 300,
    )  # fmt: skip


def test_every_plant_applies_to_the_sources(tmp_path: Path) -> None:
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) == 10

    for plant in PLANTS:
        assert planted_tree(plant, tmp_path / plant.name).is_dir()


@pytest.mark.storm
def test_the_audit_finds_eight_of_ten_planted_answers(tmp_path: Path) -> None:
    # given ten copies of the product, each with one defect
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")

    # when each is audited
    is_found_by_plant = {}
    for plant in PLANTS:
        audit_process = audit(planted_tree(plant, tmp_path / plant.name), seed)
        assert audit_process.returncode in (0, 1), audit_process.stderr
        is_found_by_plant[plant.name] = audit_process.returncode == 1
        print(f"{'found' if is_found_by_plant[plant.name] else 'MISSED'} {plant.name}: {plant.symptom}", flush=True)
        print(audit_process.stdout[-3000:], flush=True)

    # then at least eight defects are reported
    assert sum(is_found_by_plant.values()) >= AT_LEAST, is_found_by_plant
