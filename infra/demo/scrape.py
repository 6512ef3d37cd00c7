"""Counters of the service, read from /metrics."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from infra.demo.http import get
from serving.answers.sources import STORED

_SAMPLE = re.compile(r"^(larder_\w+?)(?:\{(.*)\})? ([0-9.e+naif-]+)$", re.IGNORECASE | re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


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
        for name, labels, number in _SAMPLE.findall(text):
            found = dict(_LABEL.findall(labels))
            match name:
                case "larder_entities_total":
                    entities += int(float(number))
                case "larder_answers_total":
                    sources[found["source"]] += int(float(number))
                case "larder_misses_total":
                    missed[found["reason"]] += int(float(number))
                case "larder_requests_total" if found["status"] >= "500":
                    errors += int(float(number))
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
