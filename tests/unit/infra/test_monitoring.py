import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.absence import ABSENCES
from serving.arms import ARMS
from serving.metrics import SOURCES, STAGES, Metrics
from serving.quality.reasons import REASONS, L1Misses
from serving.tally import Seconds

INFRA = Path(__file__).parents[3] / "infra"
RULES: Any = yaml.safe_load((INFRA / "prometheus/rules.yml").read_text())
DASHBOARD: Any = json.loads((INFRA / "grafana/dashboards/larder.json").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
RECORDED = {
    rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}


VALUES: dict[str, set[str]] = {
    "source": set(SOURCES),
    "stage": set(STAGES),
    "role": {"live", "previous", "next", "canary"},
    "arm": {*ARMS, "pinned", "no_key", "not_held"},
    "outcome": {"in_step", "load_failed"},
    "reason": {*REASONS, *ABSENCES},
}
"""Of each label, the values that queries may name: each has to be one that occurs."""

ADDED = {"instance", "job", "le"}
"""Labels that Prometheus and its histograms add."""


def labels() -> dict[str, set[str]]:
    """The labels of all series that the service exposes, by name."""
    found: dict[str, set[str]] = {}
    for collector in list(Metrics().registry._collector_to_names):
        if isinstance(collector, Seconds):
            samples = [each for family in collector.collect() for each in family.samples]
            found |= {each.name: set(each.labels) for each in samples}
            continue
        if isinstance(collector, L1Misses):
            found["larder_l1_misses_total"] = {"table", "reason"}
            continue
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
            "summary": ("_count", "_sum"),
        }.get(collector._type, ("",))  # type: ignore[attr-defined]
        for suffix in suffixes:
            found[collector._name + suffix] = set(collector._labelnames)  # type: ignore[attr-defined]
    return found


def selected(query: str) -> Iterator[tuple[str, str]]:
    """Yield each series of a query with what is in its braces."""
    for name, matchers in re.findall(r"\b(larder_\w+)(?:\{([^}]*)\})?", query):
        if name in exported():  # a label_values(series, label) names no series twice
            yield name, matchers


def exported() -> set[str]:
    """Return the names of all series that the service exposes."""
    names: set[str] = set()
    for family in Metrics().registry.collect():
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
            "summary": ("_count", "_sum"),
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
    for label, values in re.findall(r'(\w+)(?:=~?|!=|!~)"([^"$]*)"', query):
        if label not in ("job", "status", "event"):
            assert set(values.split("|")) <= VALUES[label]


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_selects_and_groups_by_labels_that_its_series_have(query: str) -> None:
    known = labels()
    series = list(selected(query))

    for name, matchers in series:
        assert set(re.findall(r"(\w+)[=!]~?=?", re.sub(r'"[^"]*"', "", matchers))) <= known[name] | ADDED  # fmt: skip
    grouped = re.findall(r"\b(?:by|on) \(([\w, ]+)\)", query)
    for label in {each.strip() for listed in grouped for each in listed.split(",")}:
        recorded = bool(re.search(r"\blarder:", query))
        assert label in ADDED or recorded or any(label in known[name] for name, _ in series)


def test_a_legend_names_labels_that_are_left() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            grouped = re.findall(r"\bby \(([\w, ]+)\)", target["expr"])
            left = {each.strip() for listed in grouped for each in listed.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left


def test_flips_canaries_missing_nights_and_erasures_have_an_alert_and_a_panel() -> None:
    alerts = " ".join(alert["expr"] for alert in ALERTS)
    panels = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])  # fmt: skip

    for series in (
        "larder_flip_skew_seconds", "larder_warm_seconds", "larder_canary_requests_total",
        "larder_canary_answers_total", "larder_generation_missing",
        "larder_refreshes_total", "larder_blocklist_version",
    ):  # fmt: skip
        assert series in alerts and series in panels


def test_no_two_panels_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24
        taken |= cells


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
