"""Rules and dashboards as they stand: queries read what exists, and what is shown does not lie over each other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from cache.config.night import CanaryConfig, GateThresholds
from cache.tiers.l1 import Absence
from precompute.gates.judge import INTEGRITY_RULES, OVERRIDABLE_RULES
from serving.dashboard.document import INBOX_WARN_S, REJECTED_WARN, STREAM_WARN
from serving.events.counts import ACCEPTED, ERASED, REFUSAL_REASONS, REPEATED
from serving.metrics.collectors import COUNTED_MISS_REASONS
from serving.metrics.registry import POINTER_LOOK_OUTCOMES, STAGES
from serving.requests.answers import FALLBACK_SOURCES, STORED_SOURCES, Source
from serving.traffic.canary import ARMS
from tests.exposed import labels

INFRA = Path(__file__).parents[3] / "infra"
GROUPS: list[Any] = [
    group
    for file in sorted((INFRA / "prometheus/rules").glob("*.yml"))
    for group in yaml.safe_load(file.read_text())["groups"]
]
BOARDS: dict[str, Any] = {
    file.stem: json.loads(file.read_text()) for file in sorted((INFRA / "grafana/dashboards").glob("*.json"))
}
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
PANELS = [panel for board in BOARDS.values() for panel in board["panels"] if "targets" in panel]

LABELS = labels()
VALUES: dict[str, set[str]] = {
    "source": set(Source),
    "stage": set(STAGES),
    "role": {"live", "previous", "next", "canary"},
    "arm": {*ARMS, "pinned", "no_key", "not_held"},
    "outcome": set(POINTER_LOOK_OUTCOMES),
    "reason": {*COUNTED_MISS_REASONS, *get_args(Absence), *REFUSAL_REASONS},
    "result": {ACCEPTED, REPEATED, ERASED},
    "rule": set(INTEGRITY_RULES | OVERRIDABLE_RULES),
    "producer": {"batch", "live"},
}
"""Of each label, the values that queries may name: each has to be one that occurs."""

ADDED = {"instance", "job", "le"}
"""Labels that Prometheus and its histograms add."""


def selected(query: str) -> Iterator[tuple[str, str]]:
    """Yield each series of a query with what is in its braces."""
    for name, matchers in re.findall(r"\b(larder_\w+)(?:\{([^}]*)\})?", query):
        if name in LABELS:  # a label_values(series, label) names no series twice
            yield name, matchers


def queries() -> Iterator[str]:
    """Yield every query of the rules and the dashboards."""
    for group in GROUPS:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    for board in BOARDS.values():
        yield from (annotation["expr"] for annotation in board["annotations"]["list"])
        yield from (variable["definition"] for variable in board["templating"]["list"])


QUERIES = sorted(set(queries()))


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_only_series_that_the_service_exposes(query: str) -> None:
    series = set(re.findall(r"\blarder[_:][\w:]+", query))

    assert series <= LABELS.keys() | RECORDED


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_selects_label_values_that_occur(query: str) -> None:
    for label, values in re.findall(r'(\w+)(?:=~?|!=|!~)"([^"$]*)"', query):
        if label not in ("job", "status", "event", "le"):
            assert set(values.split("|")) <= VALUES[label]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_selects_and_groups_by_labels_that_its_series_have(query: str) -> None:
    series = list(selected(query))

    for name, matchers in series:
        assert set(re.findall(r"(\w+)[=!]~?=?", re.sub(r'"[^"]*"', "", matchers))) <= LABELS[name] | ADDED  # fmt: skip
    grouped = re.findall(r"\b(?:by|on|without) \(([\w, ]+)\)", query)
    for label in {label_name.strip() for label_list in grouped for label_name in label_list.split(",")}:
        recorded = bool(re.search(r"\blarder:", query))
        assert label in ADDED or recorded or any(label in LABELS[name] for name, _ in series)


@pytest.mark.parametrize(
    ("rule", "expression_part"),
    [
        ("LarderRedisHeadroom", f"> {GateThresholds().redis_headroom} * ("),
        ("LarderCanaryFallsBack", f"> {CanaryConfig().source_shift_max} + ("),
        ("LarderEventsStreamFilling", f"> {STREAM_WARN}"),
        ("LarderEventsInboxWaits", f"> {INBOX_WARN_S}"),
        ("LarderEventsRejected", f"> {REJECTED_WARN}"),
        ("LarderEventsRejected", f'{{result!~"{ACCEPTED}|{REPEATED}|{ERASED}"}}'),
        ("larder:hit_ratio:rate5m", f'{{source=~"{"|".join(STORED_SOURCES)}"}}'),
        ("larder:fallback_ratio:rate5m", f'{{source=~"{"|".join(FALLBACK_SOURCES)}"}}'),
    ],
)
def test_what_the_program_judges_by_too_is_the_same_in_the_rules(rule: str, expression_part: str) -> None:
    (matching_rule,) = (
        candidate_rule
        for group in GROUPS
        for candidate_rule in group["rules"]
        if rule in (candidate_rule.get("alert"), candidate_rule.get("record"))
    )
    assert expression_part in matching_rule["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_names_labels_that_are_left(panel: Any) -> None:
    for target in panel["targets"]:
        grouped = re.findall(r"\bby \(([\w, ]+)\)", target["expr"])
        remaining_labels = {label_name.strip() for label_list in grouped for label_name in label_list.split(",")}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= remaining_labels


def test_flips_canaries_missing_nights_erasures_and_events_have_an_alert_and_a_panel() -> None:
    alerts = " ".join(alert["expr"] for alert in ALERTS)
    panels = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])

    for series in (
        "larder_flip_skew_seconds", "larder_warm_seconds", "larder_canary_requests_total",
        "larder_canary_answers_total", "larder_nights_missed", "larder_gate_refused",
        "larder_redis_memory_max_bytes", "larder_refreshes_total", "larder_blocklist_version",
        "larder_events_up", "larder_events_refused_total", "larder_events_stream_bytes", "larder_events_lag_seconds",
        "larder_events_inbox_lag_seconds", "larder_events_total", "larder_near_off",
    ):  # fmt: skip
        assert series in alerts and series in panels


@pytest.mark.parametrize("name", BOARDS)
def test_no_two_panels_overlap(name: str) -> None:
    occupied_cells: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not occupied_cells & cells and at["x"] + at["w"] <= 24
        occupied_cells |= cells


def test_dashboards_have_names_of_their_own_and_so_have_their_panels() -> None:
    assert set(BOARDS) == {"serving", "night", "quality", "events"}
    assert {board["uid"] for board in BOARDS.values()} == {f"larder-{name}" for name in BOARDS}
    for board in BOARDS.values():
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert len({panel["title"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_how_urgent_it_is_what_readers_notice_and_where_to_look(alert: Any) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert re.fullmatch(r"\d+[smh]", alert["for"])
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}


def test_the_dashboards_find_the_data_source_that_is_provisioned() -> None:
    folder = INFRA / "grafana/provisioning"
    sources: Any = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())
    used = {panel["datasource"]["uid"] for panel in PANELS}

    assert used == {source["uid"] for source in sources["datasources"]}


def test_prometheus_loads_the_rules_and_scrapes_a_service_of_the_compose_file() -> None:
    config: Any = yaml.safe_load((INFRA / "prometheus/prometheus.yml").read_text())
    compose: Any = yaml.safe_load((INFRA / "compose.yaml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (target,) = jobs["larder-serving"]["static_configs"][0]["targets"]

    assert config["rule_files"] == ["rules/*.yml"]
    assert target.split(":")[0] in compose["services"]
    assert 'job="larder-serving"' in str(ALERTS)
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]  # fmt: skip
    assert (INFRA / "grafana/dashboards" / Path(home).name).is_file()
