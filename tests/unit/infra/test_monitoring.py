import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.metrics import SOURCES, STAGES, Metrics

INFRA = Path(__file__).parents[3] / "infra"
RULES: Any = yaml.safe_load((INFRA / "prometheus/rules.yml").read_text())
DASHBOARD: Any = json.loads((INFRA / "grafana/dashboards/larder.json").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
RECORDED = {
    rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}


def exported() -> set[str]:
    """Return the names of all series that the service exposes."""
    names: set[str] = set()
    for family in Metrics().registry.collect():
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
        }.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def queries() -> Iterator[str]:
    """Yield every query of the rules and the dashboard."""
    for group in RULES["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["expr"] for each in DASHBOARD["annotations"]["list"])
    yield from (each["definition"] for each in DASHBOARD["templating"]["list"])


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_reads_only_series_that_the_service_exposes(query: str) -> None:
    series = set(re.findall(r"\blarder[_:][\w:]+", query))

    assert series <= exported() | RECORDED


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_closes_what_it_opens(query: str) -> None:
    bare = re.sub(r'"[^"]*"', "", query)

    for opening, closing in ("()", "{}", "[]"):
        assert bare.count(opening) == bare.count(closing)


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_selects_label_values_that_occur(query: str) -> None:
    for label, values in re.findall(r'(source|stage)=~?"([^"$]*)"', query):
        assert set(values.split("|")) <= set(SOURCES if label == "source" else STAGES)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_how_urgent_it_is_what_readers_notice_and_where_to_look(alert: Any) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert re.fullmatch(r"\d+[smh]", alert["for"])
    assert set(alert["annotations"]) == {"summary", "description"}


def test_a_night_that_never_ran_raises_an_alarm_at_the_reader() -> None:
    missed = next(alert for alert in ALERTS if alert["alert"] == "LarderNightMissed")

    assert "larder_generation_age_seconds" in missed["expr"]


def test_the_dashboard_shows_the_hit_rate_by_source() -> None:
    titles = {panel["title"]: panel for panel in DASHBOARD["panels"]}

    assert "by (source)" in titles["Hit rate by source"]["targets"][0]["expr"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_finds_the_data_source_that_is_provisioned() -> None:
    folder = INFRA / "grafana/provisioning"
    sources: Any = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())
    used = set(re.findall(r'"uid": "([\w-]+)"', json.dumps(DASHBOARD["panels"])))

    assert used == {source["uid"] for source in sources["datasources"]}


def test_prometheus_loads_the_rules_and_scrapes_a_service_of_the_compose_file() -> None:
    config: Any = yaml.safe_load((INFRA / "prometheus/prometheus.yml").read_text())
    compose: Any = yaml.safe_load((INFRA / "compose.yaml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (target,) = jobs["larder-serving"]["static_configs"][0]["targets"]

    assert config["rule_files"] == ["rules.yml"]
    assert target.split(":")[0] in compose["services"]
    assert 'job="larder-serving"' in str(ALERTS)
