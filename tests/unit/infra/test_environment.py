import re
from pathlib import Path

from cache.config.night import NightConfig
from cache.config.section import nested_section_classes, variables_by_setting
from cache.config.serving import ServingConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "infra/ENVIRONMENT.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
SETTINGS = {
    name
    for kind in (NightConfig, ServingConfig, *nested_section_classes(NightConfig).values())
    for name in variables_by_setting(kind).values()
}
REFERENCE = (ROOT / "docs/reference/configuration.md").read_text()


def test_every_setting_of_the_environment_is_documented_once() -> None:
    assert {name for name in SETTINGS if f"| `{name}` |" not in REFERENCE} == set()
    assert set() == DOCUMENTED & SETTINGS


def test_every_variable_that_code_and_compose_name_is_documented() -> None:
    files = [
        *(file for package in ("cache", "precompute", "serving", "dags") for file in (ROOT / package).rglob("*.py")),
        *(ROOT / "infra").glob("*.yaml"),
        *(ROOT / "infra").glob("*.env"),
    ]  # fmt: skip
    named = {name for file in files for name in re.findall(r"\bLARDER_[A-Z0-9_]*[A-Z0-9]\b", file.read_text())}

    assert named - DOCUMENTED - SETTINGS == {"LARDER_"} & named


def test_every_documented_variable_is_read() -> None:
    source_text = "".join(
        file.read_text()
        for pattern in (
            "cache/**/*.py",
            "precompute/**/*.py",
            "serving/**/*.py",
            "dags/*.py",
            "infra/*.yaml",
            "tests/**/*.py",
        )
        for file in ROOT.glob(pattern)
    )

    assert {name for name in DOCUMENTED if name not in source_text} == set()
