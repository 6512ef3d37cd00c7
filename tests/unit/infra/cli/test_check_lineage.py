"""`larder check` on lineage: off, half set, and on."""

import importlib.util

import pytest

from cache.config.night import NightConfig
from infra.cli.check.command import LOOKS

TRANSPORT, EXTRACTORS = "AIRFLOW__OPENLINEAGE__TRANSPORT", "AIRFLOW__OPENLINEAGE__EXTRACTORS"
OURS = "infra.lineage.extractor.NightExtractor"
IS_INSTALLED = importlib.util.find_spec("openlineage") is not None


@pytest.mark.parametrize(
    ("environ", "state", "told"),
    [
        ({}, "not used", TRANSPORT),
        ({TRANSPORT: "{}"}, "to do", EXTRACTORS if IS_INSTALLED else "larder[lineage]"),
        ({TRANSPORT: "{}", EXTRACTORS: "other.Extractor"}, "to do", OURS if IS_INSTALLED else "larder[lineage]"),
        ({"OPENLINEAGE_URL": "http://x", EXTRACTORS: f"other.Extractor;{OURS}"}, "ok" if IS_INSTALLED else "to do", ""),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    environ: dict[str, str], state: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TRANSPORT, EXTRACTORS, "OPENLINEAGE_URL", "OPENLINEAGE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    found = LOOKS["lineage"](NightConfig())

    assert found[0] == state and told in found[1]
