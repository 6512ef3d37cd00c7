"""Counters of the service, read from /metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from infra.demo.http import get
from serving.answers.sources import STORED_SOURCES


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
        for sample in chain.from_iterable(
            family.samples for family in text_string_to_metric_families(text)
        ):
            match sample.name:
                case "larder_entities_total":
                    entities += int(sample.value)
                case "larder_answers_total":
                    sources[sample.labels["source"]] += int(sample.value)
                case "larder_misses_total":
                    missed[sample.labels["reason"]] += int(sample.value)
                case "larder_requests_total" if sample.labels["status"] >= "500":
                    errors += int(sample.value)
        return cls(entities, dict(sources), dict(missed), errors)

    def disagreements(self, sources: Mapping[str, int], entities: int) -> list[str]:
        """Contradictions of these counters to each other or to what callers saw."""
        contradictions = []
        if self.entities != entities:
            contradictions.append(
                f"/metrics counts {self.entities} entities, callers sent {entities}"
            )
        if sum(self.sources.values()) != self.entities:
            contradictions.append(
                f"sources sum to {sum(self.sources.values())}, not {self.entities}"
            )
        if {k: v for k, v in self.sources.items() if v} != {k: v for k, v in sources.items() if v}:
            contradictions.append(
                f"/metrics counts {dict(self.sources)}, callers saw {dict(sources)}"
            )
        stored_count = sum(self.sources.get(source, 0) for source in STORED_SOURCES)
        if sum(self.missed.values()) != self.entities - stored_count:
            contradictions.append(
                f"{sum(self.missed.values())} misses have a reason, {self.entities - stored_count} should"
            )
        if self.errors:
            contradictions.append(f"{self.errors} responses with status 500 or more")
        return contradictions


async def scrape(url: str) -> ServiceCounts:
    """The counters now."""
    status, raw = await get(url, "/metrics")
    if status != 200:
        raise RuntimeError(f"GET /metrics: {status}")
    return ServiceCounts.read(raw.decode())
