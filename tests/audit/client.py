"""Client of the service's HTTP API that keeps its requests, so that a report can say how to repeat a violation."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from tests.audit.values import Json


@dataclass(frozen=True)
class Reply:
    """A response: status, headers, and the parsed body."""

    status: int
    headers: dict[str, str]
    body: Any
    raw: bytes = b""

    @property
    def code(self) -> str | None:
        """Code of a refusal, None of an answer."""
        if isinstance(self.body, dict) and isinstance(self.body.get("error"), dict):
            code: str = self.body["error"]["code"]
            return code
        return None


@dataclass
class Client:
    """One connection to a service, opened again when it ends."""

    port: int
    token: str | None = None
    tls: ssl.SSLContext | None = None
    recent: list[str] = field(default_factory=list)
    """Requests since the last `forget`, as lines of a recipe."""
    timeout_s: float = 30
    connection: http.client.HTTPConnection | None = None
    requests: int = 0

    def _connect(self) -> http.client.HTTPConnection:
        if self.connection is None:
            if self.tls is not None:
                self.connection = http.client.HTTPSConnection(
                    "localhost", self.port, timeout=self.timeout_s, context=self.tls
                )
            else:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)
        return self.connection

    def close(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def send(
        self, method: str, target: str, body: object | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send one request and return its reply; a connection that the service has closed is opened again."""
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        request_headers = dict(headers or {})
        if data is not None:
            request_headers.setdefault("Content-Type", "application/json")
        if self.token is not None:
            request_headers.setdefault("Authorization", f"Bearer {self.token}")
        line = f"{method} {target}" + ("" if data is None else " " + data.decode())
        if headers:
            line += f"   ({headers})"
        if self.recent[-1:] != [line]:
            self.recent.append(line)
        del self.recent[:-40]
        self.requests += 1
        for attempt in (1, 2):
            connection = self._connect()
            try:
                connection.request(method, target, data, request_headers)
                response = connection.getresponse()
                raw = response.read()
                if response.will_close:
                    self.close()
                break
            except (OSError, http.client.HTTPException):
                self.close()
                if attempt == 2:
                    raise
        try:
            parsed = json.loads(raw) if raw else None
        except ValueError:
            parsed = raw.decode("utf-8", "replace")
        names = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, names, parsed, raw)

    def is_ready(self) -> bool:
        """Return whether `/readyz` answers 200."""
        try:
            status = self.send("GET", "/readyz").status
        except (OSError, http.client.HTTPException):
            return False
        finally:
            self.close()
        return status == 200

    def lookup(self, table: str, entities: list[object], **options: object) -> Reply:
        """Ask `POST /v1/lookup/{table}`."""
        return self.send("POST", f"/v1/lookup/{quote(table, safe='')}", {"entities": entities, **options})

    def lookup_one(self, table: str, entity: str, **options: object) -> Reply:
        """Ask `GET /v1/lookup/{table}/{entity}`."""
        query_parameters = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()
        }
        query = "?" + urlencode(query_parameters, quote_via=quote) if query_parameters else ""
        return self.send("GET", f"/v1/lookup/{quote(table, safe='')}/{quote(entity, safe='')}{query}")

    def explain(self, table: str, entity: str, **options: object) -> Reply:
        """Ask `GET /v1/explain/{table}/{entity}`."""
        query_parameters = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()
        }
        query = "?" + urlencode(query_parameters, quote_via=quote) if query_parameters else ""
        return self.send("GET", f"/v1/explain/{quote(table, safe='')}/{quote(entity, safe='')}{query}")

    def events(self, events: list[Json]) -> Reply:
        """Send `POST /v1/events`."""
        return self.send("POST", "/v1/events", {"events": events})

    def metrics(self) -> dict[str, float]:
        """Read `/metrics`: values by name and labels as written."""
        reply = self.send("GET", "/metrics")
        samples: dict[str, float] = {}
        for line in reply.raw.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples
