import re
from dataclasses import fields
from pathlib import Path

from serving.config.settings import ServingConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "infra/ENVIRONMENT.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))


def test_every_setting_of_the_service_is_documented() -> None:
    names = {f"LARDER_{each.name.upper()}" for each in fields(ServingConfig)} - {"LARDER_REDIS_URL"}

    assert names - DOCUMENTED == set()


def test_every_variable_that_code_and_compose_name_is_documented() -> None:
    files = [
        *(file for package in ("cache", "precompute", "serving", "dags") for file in (ROOT / package).rglob("*.py")),
        *(ROOT / "infra").glob("*.yaml"),
        *(ROOT / "infra").glob("*.env"),
    ]  # fmt: skip
    named = {
        name
        for file in files
        for name in re.findall(r"\bLARDER_[A-Z0-9_]*[A-Z0-9]\b", file.read_text())
    }

    assert named - DOCUMENTED == {"LARDER_"} & named


def test_nothing_is_documented_that_nobody_reads() -> None:
    names = {f"LARDER_{each.name.upper()}" for each in fields(ServingConfig)}
    others = "".join(
        file.read_text()
        for pattern in (
            "cache/**/*.py",
            "precompute/**/*.py",
            "dags/*.py",
            "infra/*.yaml",
            "tests/*.py",
        )
        for file in ROOT.glob(pattern)
    )

    assert {name for name in DOCUMENTED - names if name not in others} == set()
