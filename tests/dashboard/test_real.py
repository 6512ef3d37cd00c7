"""The page of two real replicas with two workers each, over a real night, Redis and the demo's stream of requests."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.demo.checks import Judge
from infra.demo.traffic import replay
from precompute.config.settings import NightConfig
from tests.browser import Browser
from tests.dashboard import probes as probe
from tests.dashboard.faults import faults
from tests.integration.fleet import fleet
from tests.integration.nights import build_night
from tests.integration.scraping import stream
from tests.polling import poll_until

REQUESTS = 600
"""Of each replica."""
RATE = 150.0
SETTLED_LOOKS = 6
"""In a row at which all is there: a replica answers from either of its workers."""
SETTINGS = {
    "LARDER_WORKERS": "2", "LARDER_L1_BYTES": str(48 << 10), "LARDER_DASHBOARD_S": "0.5", "LARDER_QUALITY_S": "0.5",
    "LARDER_QUALITY_PER_MILLE": "300", "LARDER_QUALITY_CPU_SHARE": "1",
}  # fmt: skip
SOURCES = ("l1", "l2", "live", "previous", "default")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[list[str]]:
    """Both replicas, after their traffic."""
    night = build_night(tmp_path_factory.mktemp("night"), redis_url)
    with fleet(night, tmp_path_factory.mktemp("fleet"), count=2, **SETTINGS) as services:
        service_urls = [service.url for service in services]
        judge = Judge()
        asyncio.run(replay_streams(service_urls, night, judge))
        assert judge.violations == []
        differences_by_look: list[list[Any]] = []
        assert poll_until(lambda: is_settled(service_urls, differences_by_look), 180.0, every_s=0.2), (
            differences_by_look[-SETTLED_LOOKS:]
        )
        yield service_urls


async def replay_streams(urls: list[str], night: NightConfig, judge: Judge) -> None:
    streams = (stream(night, seed) for seed in range(len(urls)))
    await asyncio.gather(
        *(
            replay(url, islice(request_stream, REQUESTS), judge, requests_per_s=RATE)
            for url, request_stream in zip(urls, streams, strict=True)
        )
    )


def document(url: str) -> Any:
    return httpx.get(f"{url}/dashboard/data").raise_for_status().json()


def scrape_totals(urls: list[str]) -> dict[str, Any]:
    """Return the totals of both replicas from Prometheus' metrics."""
    counts_by_metric: dict[str, Counter[str]] = {}
    for url in urls:
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
            for sample in family.samples:
                label = sample.labels.get("source") or sample.labels.get("reason") or ""
                counts_by_metric.setdefault(sample.name, Counter())[label] += int(sample.value)
    return {
        "requests": counts_by_metric["larder_requests_total"].total(),
        "entities": counts_by_metric["larder_entities_total"].total(),
        "answers": {source: counts_by_metric["larder_answers_total"][source] for source in SOURCES},
        "misses": dict(counts_by_metric["larder_misses_total"]),
        "samples": counts_by_metric["larder_quality_samples_total"].total(),
    }


def dashboard_totals(data: Any) -> dict[str, Any]:
    """Return the same totals from the dashboard's document."""
    return {**data["totals"], "samples": data["quality"]["samples"]}


def is_settled(urls: list[str], differences_by_look: list[list[Any]]) -> bool:
    """Return whether the last requests, each to any worker, showed no missing data."""
    differences_by_look.append(unsettled(urls))
    return len(differences_by_look) >= SETTLED_LOOKS and not any(differences_by_look[-SETTLED_LOOKS:])


def unsettled(urls: list[str]) -> list[Any]:
    """Return the parts of the documents that do not show all data yet, for each service."""
    differences: list[Any] = []
    for url in urls:
        data, first, expected = document(url), document(urls[0]), scrape_totals(urls)
        if dashboard_totals(data) != expected:
            differences.append(("totals", url, dashboard_totals(data), expected))
        if sum(data["series"]["requests"]) != data["totals"]["requests"]:
            differences.append(("series", url, data["series"]["requests"], data["totals"]["requests"]))
        differences += [
            ("quality", url, quality_field, data["quality"])
            for quality_field in ("worklist", "read_share")
            if not data["quality"][quality_field]
        ]
        if not (data["advisor"] and alike(data["advisor"], first["advisor"])):
            differences.append(("advisor", url, data["advisor"], first["advisor"]))
    return differences


def alike(advisor: Any, other_advisor: Any) -> bool:
    return bool(advisor["hit_ratio"] == pytest.approx(other_advisor["hit_ratio"], abs=1e-3))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_all_workers_and_replicas_as_one_whole(
    browser: Browser, urls: list[str], width: int, scheme: str
) -> None:
    url = urls[width % 2]
    browser.window(width, scheme=scheme)

    browser.open(f"{url}/dashboard")
    browser.wait_until(probe.IS_UPDATED)
    browser.keep(f"real-{width}-{scheme}.png")
    browser.run(probe.OPEN_ALL)

    data, expected = document(url), scrape_totals(urls)
    assert faults(data) == []
    assert [replica["workers"] for replica in data["replicas"]] == [2, 2]
    text = browser.run("document.body.innerText").replace("\u00a0", " ")
    assert browser.run(probe.SENTENCE).replace("\u00a0", " ") == data["verdict"]["sentence"]
    assert data["generations"][0]["generation"] in text
    for expected_text in (
        "Numbers of 2 replicas together.",
        f"{expected['requests']:,} since the start",
        f"of {sum(expected['answers'].values()):,} answers in 5 min",
        f"{sum(expected['misses'].values()):,} since the start",
        *(f"{count:,} · " for count in expected["misses"].values()),
        f"identical, of {expected['samples']:,}",
        data["quality"]["sentence"],
        "L1 of 48 KiB gives",
    ):
        assert expected_text in text, expected_text
    assert by_source(browser) == [f"{expected['answers'][source]:,}" for source in SOURCES]
    assert browser.run(probe.NONSENSE) == browser.run(probe.BENT) == []
    assert browser.run(probe.FAINT) == browser.run(probe.UNLABELLED) == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []
    assert {Path(requested_url).parts[1] for requested_url in browser.requested_urls()} == {
        httpx.URL(url).netloc.decode()
    }


def by_source(browser: Browser) -> list[str]:
    """Sums of the columns of the table of answers by source."""
    cells: list[list[str]] = browser.run(
        "[...document.querySelector('details.tabular table').tBodies[0].rows]"
        ".map((row) => [...row.cells].slice(2).map((cell) => cell.textContent))"
    )
    rows = [[int(cell.replace(",", "")) for cell in row] for row in cells]
    return [f"{sum(column):,}" for column in zip(*rows, strict=True)]
