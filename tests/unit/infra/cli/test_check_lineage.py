"""`larder check` on lineage: off, half set, and on."""

from importlib.metadata import PackageNotFoundError

import pytest

from cache.config.night import NightConfig
from infra.cli import check
from infra.cli.check import CHECK_BY_SUBJECT

TRANSPORT, EXTRACTORS = "AIRFLOW__OPENLINEAGE__TRANSPORT", "AIRFLOW__OPENLINEAGE__EXTRACTORS"
PROVIDER = "apache-airflow-providers-openlineage"
NIGHT_EXTRACTOR = "infra.lineage.extractor.NightExtractor"


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes `larder check` see these packages and no others."""

    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(check, "version", version)


@pytest.mark.parametrize(
    ("environ", "state", "expected_message"),
    [
        ({}, "not used", TRANSPORT),
        ({TRANSPORT: "{}"}, "to do", EXTRACTORS),
        ({TRANSPORT: "{}", EXTRACTORS: "other.Extractor"}, "to do", NIGHT_EXTRACTOR),
        ({TRANSPORT: "{}", EXTRACTORS: f"other.Extractor; {NIGHT_EXTRACTOR} ;"}, "ok", ""),
        ({"OPENLINEAGE_URL": "http://x", EXTRACTORS: f"other.Extractor;{NIGHT_EXTRACTOR}"}, "ok", ""),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    environ: dict[str, str], state: str, expected_message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*check.LINEAGE_TRANSPORTS, EXTRACTORS):
        monkeypatch.delenv(name, raising=False)
    installed(monkeypatch, PROVIDER)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    finding = CHECK_BY_SUBJECT["lineage"](NightConfig())

    assert finding[0] == state and expected_message in finding[1]


def test_openlineages_own_client_is_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT, "{}")
    monkeypatch.setenv(EXTRACTORS, NIGHT_EXTRACTOR)
    installed(monkeypatch, "openlineage-python")

    state, message = CHECK_BY_SUBJECT["lineage"](NightConfig())

    assert state == "to do" and PROVIDER in message and "larder-predictions[lineage]" in message
