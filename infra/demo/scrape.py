"""Counters of the service, read from /metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from infra.demo.http import get
from serving.answers.sources import STORED


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Totals since the service started."""

    entities: int
    sources: Mapping[str, int]
    missed: Mapping[str, int]
    errors: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse the text format of Prometheus."""
        sources: Counter[str] = Counter()
        missed: Counter[str] = Counter()
        entities = errors = 0
        for each in chain.from_iterable(
            family.samples for family in text_string_to_metric_families(text)
        ):
            match each.name:
                case "larder_entities_total":
                    entities += int(each.value)
                case "larder_answers_total":
                    sources[each.labels["source"]] += int(each.value)
                case "larder_misses_total":
                    missed[each.labels["reason"]] += int(each.value)
                case "larder_requests_total" if each.labels["status"] >= "500":
                    errors += int(each.value)
        return cls(entities, dict(sources), dict(missed), errors)

    def disagreements(self, sources: Mapping[str, int], entities: int) -> list[str]:
        """Contradictions of these counters to each other or to what callers saw."""
        found = []
        if self.entities != entities:
            found.append(f"/metrics counts {self.entities} entities, callers sent {entities}")
        if sum(self.sources.values()) != self.entities:
            found.append(f"sources sum to {sum(self.sources.values())}, not {self.entities}")
        if {k: v for k, v in self.sources.items() if v} != {k: v for k, v in sources.items() if v}:
            found.append(f"/metrics counts {dict(self.sources)}, callers saw {dict(sources)}")
        plain = sum(self.sources.get(each, 0) for each in STORED)
        if sum(self.missed.values()) != self.entities - plain:
            found.append(
                f"{sum(self.missed.values())} misses have a reason, {self.entities - plain} should"
            )
        if self.errors:
            found.append(f"{self.errors} responses with status 500 or more")
        return found


async def scrape(url: str) -> ServiceCounts:
    """The counters now."""
    status, raw = await get(url, "/metrics")
    if status != 200:
        raise RuntimeError(f"GET /metrics: {status}")
    return ServiceCounts.read(raw.decode())
