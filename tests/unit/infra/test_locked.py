"""What CI and the documents install: nothing but what the locks pin."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TARGET = re.compile(r"^([a-z-]+-env):.*\n((?:\t.*\n)+)", re.MULTILINE)


def test_every_environment_of_the_run_is_made_by_hash() -> None:
    run = (ROOT / ".ci/run").read_text()
    syncs = {
        target: [line for line in commands.splitlines() if "pip sync" in line]
        for target, commands in TARGET.findall((ROOT / "Makefile").read_text())
        if re.search(rf"\b{target}\b", run)
    }

    assert len(syncs["judges-env"]) == len(syncs["advisories-env"]) == 1
    lines = [line for target_lines in syncs.values() for line in target_lines]
    assert [line for line in lines if "--require-hashes" not in line] == []


def test_the_image_with_lineage_is_made_of_the_locks_provider() -> None:
    pins = re.findall(r"apache-airflow-providers-openlineage==\S+", (ROOT / "docs/how-to/trace-lineage.md").read_text())

    assert len(pins) == 1 and f"{pins[0]} \\\n" in (ROOT / "infra/locks/all.txt").read_text()
