"""HTTP client on asyncio streams without retries, and counters read from /metrics."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from serving.requests.answers import STORED_SOURCES


class HttpConnection:
    """Connection for one request at a time; it opens at the first one, and again after an error."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return (status, body); raise OSError or TimeoutError without an answer. Never retries."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(method, path, body)
        except BaseException:
            self.close()  # a half-read answer must not be taken for the next one
            raise

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        status, length, closing = _head(answer)
        response_body = await reader.readexactly(length)
        if closing:
            self.close()
        return status, response_body


def _head(answer: bytes) -> tuple[int, int, bool]:
    first, *lines = answer.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" not in headers:
        raise ConnectionError(f"an answer without Content-Length: {first}")
    closing = headers.get("connection", "").lower() == "close"
    return int(first.split()[1]), int(headers["content-length"]), closing


async def get(url: str, path: str) -> tuple[int, bytes]:
    """Send a GET request on a connection of its own; return (status, body)."""
    async with HttpConnection(url) as connection:
        return await connection.request("GET", path)


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
        for sample in chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
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
        """Return contradictions within these counters, or with what callers saw."""
        contradictions = []
        if self.entities != entities:
            contradictions.append(f"/metrics counts {self.entities} entities, callers sent {entities}")
        if sum(self.sources.values()) != self.entities:
            contradictions.append(f"sources sum to {sum(self.sources.values())}, not {self.entities}")
        if {k: v for k, v in self.sources.items() if v} != {k: v for k, v in sources.items() if v}:
            contradictions.append(f"/metrics counts {dict(self.sources)}, callers saw {dict(sources)}")
        stored_count = sum(self.sources.get(source, 0) for source in STORED_SOURCES)
        if sum(self.missed.values()) != self.entities - stored_count:
            contradictions.append(
                f"{sum(self.missed.values())} misses have a reason, {self.entities - stored_count} should"
            )
        if self.errors:
            contradictions.append(f"{self.errors} responses with status 500 or more")
        return contradictions


async def scrape(url: str) -> ServiceCounts:
    """Return the current counters."""
    status, raw = await get(url, "/metrics")
    if status != 200:
        raise RuntimeError(f"GET /metrics: {status}")
    return ServiceCounts.read(raw.decode())
