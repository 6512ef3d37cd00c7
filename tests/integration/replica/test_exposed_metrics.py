"""What dashboards and alerts read is what a running service exposes, also around a flip."""

import asyncio
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from cache.config.events import EventsConfig
from cache.config.serving import NearConfig
from tests.certificates import Authority
from tests.integration.nights import DATA_UNTIL, build_night, build_verified, publish
from tests.integration.scraping import BOARDS, INFRA
from tests.integration.serving_app import eventually, serving


def read_series() -> set[str]:
    """The series that some rule or panel reads, recorded ones left out."""
    rules = [yaml.safe_load(file.read_text()) for file in (INFRA / "prometheus/rules").glob("*.yml")]
    groups: list[Any] = [group for rule_file in rules for group in rule_file["groups"]]
    queries = [rule["expr"] for group in groups for rule in group["rules"]]
    panels = [panel for board in BOARDS for panel in board["panels"]]
    queries += [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return {name for query in queries for name in re.findall(r"\blarder_\w+", query)}


async def test_a_running_service_exposes_what_is_read_and_measures_its_flips(tmp_path: Path, redis_url: str) -> None:
    night = build_night(tmp_path, redis_url, users=200, items=60)
    later = (datetime.fromisoformat(DATA_UNTIL) + timedelta(minutes=30)).isoformat()
    next_ = await asyncio.to_thread(build_verified, night, later)

    tls = Authority.create(tmp_path / "tls").signed("replica")

    files = {"tls_certificate": str(tls.certificate), "tls_key": str(tls.key)}
    more = {"events": EventsConfig(enabled=True), "near": {"user_topk": NearConfig()}}
    async with serving(night, **files, **more) as app:
        await asyncio.to_thread(publish, night, next_)

        async def measured() -> bool:
            (skew,) = (await app.scrape_samples("larder_flip_skew_seconds")).values()
            (warm,) = (await app.scrape_samples("larder_warm_seconds")).values()
            return skew != 0 and warm > 0

        assert await eventually(measured)
        text = (await app.http.get("/metrics")).text
        generation_infos = await app.scrape_samples("larder_generation_info")
        steps = await app.scrape_samples("larder_night_step_seconds")

    named = dict(re.findall(r"^# TYPE (larder_\w+) (\w+)$", text, re.MULTILINE))
    suffixes = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}
    exposed = {name + end for name, kind in named.items() for end in suffixes.get(kind, ("",))}
    assert read_series() <= exposed
    assert {role for _, role in generation_infos} == {"live", "previous"}
    assert {step for (step,) in steps} == {
        "begin", "embed_items", "score", "index", "quantize", "load", "verify",
    }  # fmt: skip
