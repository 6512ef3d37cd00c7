"""A real Prometheus with this repository's settings and rules, over services that a test has started."""

import json
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cache.process.child_process import GuardedCommand
from infra.demo.checks import Judge
from infra.demo.dataset import Dataset
from infra.demo.traffic import RequestStream, replay_in_background
from precompute.config.settings import NightConfig
from tests.integration.nights import DATA_UNTIL, histories
from tests.polling import poll_until

INFRA = Path(__file__).parents[2] / "infra"
BOARDS: list[Any] = [json.loads(file.read_text()) for file in sorted((INFRA / "grafana/dashboards").glob("*.json"))]

SCRAPE_S = 0.25
EVALUATE_S = 0.5
LOOK_S = 0.1
"""Between looks at what Prometheus says."""

_LENGTH = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|(?<=offset )(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no Prometheus on PATH: apt-get install prometheus, or run .ci/run",
)


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    http: httpx.Client

    def run_query(self, query: str) -> list[Any]:
        """The samples of an instant query; fails on one that Prometheus refuses."""
        answer = self.http.post("/api/v1/query", data={"query": query}).json()
        assert answer["status"] == "success", f"{query}: {answer}"
        series: list[Any] = answer["data"]["result"]
        return series

    def value(self, query: str) -> float:
        """The one sample of a query, NaN if there is none."""
        series = self.run_query(query)
        return float(series[0]["value"][1]) if series else float("nan")

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        return self._names('ALERTS{alertstate="firing"}')

    def fired(self) -> set[str]:
        """The alerts that fire now or ever did."""
        return self._names('last_over_time(ALERTS{alertstate="firing"}[1h])')

    def _names(self, query: str) -> set[str]:
        return {alert["metric"]["alertname"] for alert in self.run_query(query)}


@contextmanager
def prometheus(folder: Path, services: Sequence[str], *, faster: float = 1.0) -> Iterator[Prometheus]:
    """Scrape these services; durations in the rules (ranges, offsets, `for`) are divided by `faster`."""
    config: Any = yaml.safe_load((INFRA / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": _text(SCRAPE_S), "evaluation_interval": _text(EVALUATE_S)}  # fmt: skip
    (job,) = [
        scrape_config for scrape_config in config["scrape_configs"] if scrape_config["job_name"] == "larder-serving"
    ]
    job["static_configs"] = [{"targets": [service_url.removeprefix("http://") for service_url in services]}]
    config["scrape_configs"] = [job]
    (folder / "rules").mkdir(parents=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for file in (INFRA / "prometheus/rules").glob("*.yml"):
        rules = quicker(yaml.safe_load(file.read_text()), faster)
        (folder / "rules" / file.name).write_text(yaml.safe_dump(rules))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (
        GuardedCommand(command, log_path=folder / "log") as process,
        httpx.Client(base_url=f"http://{address}") as http,
    ):
        running = Prometheus(http)

        def scraped() -> bool:
            return is_ready(http) and running.value("count(up == 1)") == len(services)

        assert poll_until(scraped, every_s=LOOK_S), process.log_tail()
        yield running


def quicker(rules: Any, faster: float) -> Any:
    """Return rules with every duration divided by `faster`."""

    def shorter(length_match: re.Match[str]) -> str:
        number, unit = (matched_group for matched_group in length_match.groups() if matched_group is not None)
        return _text(int(number) * _SECONDS[unit] / faster)

    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _LENGTH.sub(shorter, rule["expr"])
            if "for" in rule:
                rule["for"] = _text(int(rule["for"][:-1]) * _SECONDS[rule["for"][-1]] / faster)
    return rules


def _text(seconds: float) -> str:
    return f"{max(1, round(seconds * 1_000))}ms"


def is_ready(http: httpx.Client) -> bool:
    """Whether the server answers queries."""
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


def sampling(*, every_s: float) -> dict[str, str]:
    """Return settings that sample every answer, and judge as many as a tenth of a core allows."""
    return {"LARDER_QUALITY_PER_MILLE": "1000", "LARDER_QUALITY_CPU_SHARE": "0.1", "LARDER_QUALITY_S": str(every_s)}


def traffic(url: str, night: NightConfig, judge: Judge, *, rate: float) -> AbstractContextManager[object]:
    """Send the demo's requests over this night's users: hits, misses, live answers and defaults."""
    return replay_in_background(url, stream(night), judge, requests_per_s=rate)


def stream(night: NightConfig, seed: int = 0) -> RequestStream:
    """Return the demo's requests; some of this night's users send their history under an unknown id."""
    stories = {user: tuple(history) for user, history in histories(night).items()}
    newcomers = {f"new-{user}": history for user, history in sorted(stories.items())[:40]}
    cut = datetime.fromisoformat(DATA_UNTIL)
    dataset = Dataset("night", stories, {}, newcomers, None, cut, cut, frozenset())
    return RequestStream(dataset, seed)
