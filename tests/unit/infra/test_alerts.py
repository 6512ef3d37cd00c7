"""Each alert fires and stays silent as it should, says promtool, and has a section in the runbook to follow."""

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from infra.cli.completion import build_root_parser
from tests.unit.infra.test_monitoring import ALERTS, INFRA
from tests.unit.infra.test_prometheus import needs_promtool

CASES: dict[str, list[Any]] = {
    file.name: yaml.safe_load(file.read_text())["tests"] for file in sorted((INFRA / "prometheus/tests").glob("*.yml"))
}
NAMES = [alert["alert"] for alert in ALERTS]
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
SECTIONS = dict(
    re.findall(r"^### (\w+)\n(.*?)(?=^###? |\Z)", (INFRA / "RUNBOOK.md").read_text(), re.MULTILINE | re.DOTALL)
)
COMMANDS = sorted(
    {re.sub(r"\s+", " ", command) for text in SECTIONS.values() for command in re.findall(r"`([^`]+)`", text)}
)  # fmt: skip


def fires(case: Any) -> set[str]:
    """The alerts that a case expects."""
    (expression_test,) = case["promql_expr_test"]
    assert expression_test["expr"] == FIRING
    return {re.findall(r'"(\w+)"', sample["labels"])[0] for sample in expression_test["exp_samples"]}


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_alerts_fire_and_stay_silent_as_their_cases_say(name: str) -> None:
    file = INFRA / "prometheus/tests" / name
    completed_process = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip

    assert completed_process.returncode == 0, completed_process.stdout + completed_process.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent(name: str) -> None:
    about = [case for cases in CASES.values() for case in cases if case["name"].split()[0] == name]
    firing = [name in fires(case) for case in about]

    assert any(firing) and not all(firing)
    for case, does in zip(about, firing, strict=True):
        assert case["name"].split(maxsplit=1)[1].startswith("fires" if does else "is silent")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_a_silent_case_has_all_that_the_alert_reads(alert: Any) -> None:
    """A case without the series would be silent whatever the alert says."""
    read = set(re.findall(r"\blarder_\w+|\bup\b", alert["expr"]))
    for case in (case for cases in CASES.values() for case in cases):
        if case["name"].startswith(f"{alert['alert']} is silent"):
            series_names = {re.split(r"\{", series["series"])[0] for series in case["input_series"]}
            assert series_names and read <= series_names


def test_the_runbook_has_a_section_for_every_alert_and_for_nothing_else() -> None:
    assert sorted(SECTIONS) == sorted(NAMES) and len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_points_at_its_section_which_says_all_that_is_needed(alert: Any) -> None:
    text = SECTIONS[alert["alert"]]

    assert alert["annotations"]["runbook_url"] == f"infra/RUNBOOK.md#{alert['alert'].lower()}"
    assert re.findall(r"^- \*\*([\w ]+)\*\*", text, re.MULTILINE) == ["Means", "Look", "Do", "Over when"]
    assert f"(*{alert['labels']['severity']}*)" in text


def test_every_series_that_the_runbook_names_is_one_that_rules_or_dashboards_read() -> None:
    named_series = {series for text in SECTIONS.values() for series in re.findall(r"\blarder[_:][\w:]+", text)}
    files = [*(INFRA / "prometheus/rules").glob("*.yml"), *(INFRA / "grafana").rglob("*.json")]
    read = "".join(file.read_text() for file in files)

    assert {series for series in named_series if series not in read} == set()


@pytest.mark.parametrize("command", [command for command in COMMANDS if re.match("larder |curl|airflow", command)])
def test_a_command_of_the_runbook_exists(command: str) -> None:
    arguments = shlex.split(command)
    match arguments[:3]:
        case ["larder", *_]:
            build_root_parser().parse_args(arguments[1:])
        case ["curl", "-s", address]:
            path = address.removeprefix("$LARDER")
            files = ("routes.py", "openapi.py")
            routes = "".join((INFRA.parent / "serving/http" / name).read_text() for name in files)
            assert path in routes and path
        case ["airflow", "dags", _]:
            assert (INFRA.parent / f"dags/{arguments[3]}.py").is_file()
        case _:
            raise AssertionError(f"nobody has looked whether this exists: {command}")


def test_a_command_that_does_not_exist_would_be_found() -> None:
    for line in (["roll-back", "--because", "REASON"], ["roll-forward"]):
        with pytest.raises(SystemExit):
            build_root_parser().parse_args(line)
