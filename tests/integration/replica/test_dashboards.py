"""Every query of the dashboards, asked of a real Prometheus that scraped the real service under load, finds data."""

import math
import re
import subprocess
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import httpx

from cache.config.events import EventsConfig
from infra.demo.checks import Judge
from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from precompute.traffic.canary import trial
from tests.integration.nights import DATA_UNTIL, build_verified, environment, histories, prepare, publish, publish_night
from tests.integration.scraping import BOARDS, Prometheus, needs_prometheus, prometheus, sampling, traffic
from tests.polling import poll_until

pytestmark = needs_prometheus

RATE_INTERVAL = "10s"
"""Grafana takes four scrapes at least; here one that spans the whole of what the test does not wait for."""

VARIABLE = re.compile(r"label_values\((\w+), (\w+)\)")
QUERIES = {
    target["expr"]: f"{board['title']}: {panel['title']}"
    for board in BOARDS for panel in board["panels"] for target in panel.get("targets", ())
} | {
    annotation["expr"]: f"{board['title']}: annotation {annotation['name']}"
    for board in BOARDS for annotation in board["annotations"]["list"]
} | {
    VARIABLE.sub(r"count by (\2) (\1)", variable["definition"]): f"{board['title']}: variable {variable['name']}"
    for board in BOARDS for variable in board["templating"]["list"]
}  # fmt: skip
"""Queries by what shows them; a variable's values are what its label has."""


def without_data(server: Prometheus) -> list[str]:
    """Panels, annotations and variables whose query finds nothing, or no number."""
    queries_without_data = []
    for query, element_name in sorted(QUERIES.items()):
        expanded_query = query.replace("$__rate_interval", RATE_INTERVAL).replace("$table", ".*")
        if all(math.isnan(float(series["value"][1])) for series in server.run_query(expanded_query)):
            queries_without_data.append(f"{element_name}: {query}")
    return queries_without_data


def later(config: NightConfig, minutes: int) -> str:
    return (datetime.fromisoformat(DATA_UNTIL) + timedelta(minutes=minutes)).isoformat()


def test_every_panel_of_every_dashboard_has_data(tmp_path: Path, redis_url: str) -> None:
    night = replace(prepare(tmp_path / "night", redis_url, users=200, items=60), events=EventsConfig(enabled=True))
    publish_night(night, DATA_UNTIL)
    (tmp_path / "larder.toml").write_text("[events]\nenabled = true\n[serving.near.user_topk]\nerror = 0.5\n")
    next_, tried = build_verified(night, later(night, 30)), ""
    more = {
        "LARDER_CONFIG": str(tmp_path / "larder.toml"),
        "LARDER_WORKERS": "2",
        "LARDER_FIGURES_S": "0.3",
        "LARDER_BREAKER_COOLDOWN_S": "0.2",
        **sampling(every_s=0.3),
    }
    judge, users = Judge(), iter(sorted(histories(night)))
    with (
        ServiceProcess(tmp_path / "log", environment(night, **more)) as service,
        prometheus(tmp_path / "prometheus", [service.url]) as server,
        traffic(service.url, night, judge, rate=100.0),
        httpx.Client(base_url=service.url) as http,
    ):
        publish(night, next_)
        tried = build_verified(night, later(night, 60))
        trial.start(night, tried, percent=50.0, attempt="start")

        def report() -> bool:
            http.post("/v1/feedback", json={"event": "click", "canary_key": "somebody"})
            # The model knows nothing of this history, so there is nothing to compute a live answer from.
            strange = {"entities": [{"id": "odd", "history": ["no-such-item"]}]}
            http.post("/v1/lookup/user_topk", json=strange)
            path = f"/v1/lookup/user_topk/{quote(user := next(users), safe='')}"
            if items := http.get(path).json().get("items"):  # none while it has more to do than it can
                click = {"id": "click", "user": user, "item": items[0]}
                http.post("/v1/events", json={"events": [click, click, {"id": "no-event"}]})
                poll_until(lambda: http.get(path).json().get("events") == 1, 2.0)
            return not without_data(server)

        assert poll_until(report, 120.0, every_s=0.5), without_data(server)
        exposed = http.get("/metrics").content
        assert server.value("count(count by (worker) (larder_ready))") == 2

    assert judge.violations == []
    lint = ["promtool", "check", "metrics"]
    linted = subprocess.run(lint, input=exposed, capture_output=True, timeout=30, check=False)
    assert linted.returncode == 0, linted.stderr.decode()
