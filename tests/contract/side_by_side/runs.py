"""A run: requests of one seed to both services, what they reached, and how their answers differ."""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import orjson
import pyarrow as pa

from tests.contract.side_by_side.differences import ARROW
from tests.contract.side_by_side.exchange import Answer, Request
from tests.contract.side_by_side.requests import request
from tests.contract.side_by_side.twins import Twins
from tests.contract.side_by_side.world import ShopFacts

_FIELD_VALUES: Final = re.compile(rb'"(code|reason|live|source|producer|reranked|stale)":"([a-z0-9_+,]+)"')
_VALUES: Final = (b'"attributes"', b'"features"', b'"vector"')


@dataclass
class Met:
    """What a run's requests reached: words by the field that has them, and what was sent."""

    field_values: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)

    def note(self, sent_request: Request, answer: Answer) -> None:
        """Count a request and its answer."""
        self.kinds[sent_request.kind] += 1
        self.statuses[answer.status] += 1
        if answer.status < 300:
            self.options.update(sent_request.options)
        if answer.header("content-type") == ARROW:
            self.forms["arrow"] += 1
            with pa.ipc.open_stream(answer.body) as stream:
                table = stream.read_all()
            for name in ("reason", "live", "source", "producer", "reranked"):
                self.field_values.update((name, field_value) for field_value in table[name].to_pylist() if field_value)
        else:
            self.forms["json"] += 1
            pairs = _FIELD_VALUES.findall(answer.body)
            self.field_values.update((name.decode(), raw_value.decode()) for name, raw_value in pairs)

    def of(self, name: str) -> set[str]:
        """Return the words that a field had."""
        return {field_value for field_name, field_value in self.field_values if field_name == name}

    def __str__(self) -> str:
        lines = [f"{name}: {_format_counts(counts)}" for name, counts in (
            ("requests", self.kinds), ("statuses", self.statuses), ("options", self.options), ("forms", self.forms),
        )]  # fmt: skip
        for name in sorted({name for name, _ in self.field_values}):
            counts = Counter(
                {
                    field_value: count
                    for (field_name, field_value), count in self.field_values.items()
                    if field_name == name
                }
            )
            lines.append(f"{name}: {_format_counts(counts)}")
        return "\n".join(lines)


@dataclass
class Run:
    """Requests of a seed to both services; `headers` are those that all requests have."""

    twins: Twins
    seed: int
    facts: ShopFacts
    met: Met = field(default_factory=Met)
    differences_max: int = 5
    """Differences after which the run ends."""
    differing: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def send_all(self, numbers: Iterable[int]) -> None:
        """Send the requests of these numbers until enough of them were answered differently."""
        started_at = time.monotonic()
        for number in numbers:
            self.send(request(self.seed, number, self.facts, self.twins.headers))
            if len(self.differing) >= self.differences_max:
                break
        self.seconds += time.monotonic() - started_at

    def send(self, sent_request: Request) -> tuple[Answer, Answer]:
        """Send one request to both; return the answers."""
        answers, change = self.twins.compare(sent_request)
        self.met.note(sent_request, answers[0])
        if change is not None:
            heading = f"request {sent_request.number} of seed {self.seed} ({sent_request.kind})"
            self.differing.append(f"{heading}\n  {sent_request.curl(self.twins.urls[0])}\n  {change}")
        elif answers[0].status == 202 and orjson.loads(answers[0].body)["accepted"]:
            has_values = any(value_field in sent_request.body for value_field in _VALUES)
            self.twins.follow_events(answers, has_values=has_values)
        return answers

    def check(self) -> None:
        """Raise AssertionError with all differences."""
        if self.differing:
            listing = "\n".join(self.differing)
            heading = f"left is the frozen commit, right this tree (LARDER_SEED={self.seed} repeats it)"
            raise AssertionError(f"{heading}\n{listing}")


def _format_counts(counts: "Counter[str] | Counter[int]") -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: str(pair[0])))
