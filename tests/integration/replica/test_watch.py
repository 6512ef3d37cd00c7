"""What a running service tells about its requests: stage times, request ids, spans, log lines."""

import contextlib
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from cache.process.redis_server import RedisServer
from precompute.config.settings import NightConfig
from serving.explain.explainer import Explainer
from serving.tracing import attach
from serving.tracing.observer import log as request_log
from serving.tracing.otel_spans import Spans
from tests.attached import attached
from tests.integration.nights import build_night, histories
from tests.integration.program import ROOT, environment, started
from tests.integration.serving_app import serving

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
PATH = "/v1/lookup/user_topk/"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("watched"), redis_url)


@pytest.fixture(scope="module")
def users(night: NightConfig) -> list[str]:
    return sorted(histories(night))


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Takes the spans of every service that the test starts with traces on."""
    memory_exporter = InMemorySpanExporter()

    def make(config: object, instance: str) -> Spans:
        sampled_share, with_ids = config.traces_share, config.traces_ids  # type: ignore[attr-defined]
        processor = SimpleSpanProcessor(memory_exporter)
        memory_exporter._stopped = False  # by the service before
        return Spans(processor, trace_share=sampled_share, with_entity_ids=with_ids, instance_id=instance)

    monkeypatch.setattr(attach, "_open_spans", make)
    return memory_exporter


def stages(response: httpx.Response) -> dict[str, float]:
    """`Server-Timing` by stage, in milliseconds."""
    timing_header = response.headers.get("server-timing", "")
    assert re.fullmatch(r"(\w+;dur=\d+\.\d{3}(, |$))*", timing_header), timing_header
    return {
        stage_duration[0]: float(stage_duration[1])
        for stage_duration in re.findall(r"(\w+);dur=([\d.]+)", timing_header)
    }


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_an_answer_tells_its_stages_and_a_plain_single_lookup_if_asked(
    night: NightConfig, users: list[str]
) -> None:
    async with serving(night) as service:
        timing_headers = {"X-Larder-Timing": "1"}
        first, second = [await service.http.get(PATH + users[0], headers=timing_headers) for _ in range(2)]
        untimed_response = await service.http.get(PATH + users[1])
        ready = [await service.http.get(PATH + users[0]) for _ in range(2)][1]
        timed_response = await service.http.get(PATH + users[0], headers=timing_headers)
        unknown = await service.http.get(PATH + "nobody at all")
        history = {"entities": [{"id": "new", "history": histories(night)[users[0]]}]}
        live = await service.http.post("/v1/lookup/user_topk", json=history)
        batch = await service.http.post("/v1/lookup/user_topk", json={"entities": users[5:9]})
        score = await service.http.post("/v1/score", json={"user": users[0], "items": ["i-00001"]})

    assert first.json()["source"] == "l2" and set(stages(first)) == {"stored", "total"}
    assert stages(first)["stored"] <= stages(first)["total"]
    assert second.json()["source"] == "l1" and set(stages(second)) == {"total"}
    assert ready.json()["source"] == "l1" and "server-timing" not in ready.headers
    assert untimed_response.json()["source"] == "l2" and "server-timing" not in untimed_response.headers
    assert timed_response.json()["source"] == "l1" and set(stages(timed_response)) == {"total"}
    assert set(stages(unknown)) == {"parse", "stored", "total"} and "x-request-id" in unknown.headers
    assert live.json()["answers"][0]["source"] == "live"
    assert set(stages(live)) == {"parse", "stored", "live", "total"}
    assert set(stages(batch)) == {"stored", "total"} and "total" in stages(score)
    assert {**timed_response.json(), "age_seconds": 0} == {**ready.json(), "age_seconds": 0}


async def test_stage_times_can_be_kept_back_and_strangers_get_none(night: NightConfig, users: list[str]) -> None:
    async with serving(night, server_timing=False) as service:
        response = await service.http.get(PATH + users[0], headers={"X-Larder-Timing": "1"})
        assert response.status_code == 200 and "server-timing" not in response.headers
    async with serving(night, token="secret") as service:
        refused = await service.http.get(PATH + users[0])
        assert refused.status_code == 401 and "server-timing" not in refused.headers


async def test_a_request_keeps_its_id_if_a_log_can_hold_it(night: NightConfig, users: list[str]) -> None:
    async with serving(night) as service:

        async def id_of(request_id: str) -> str:
            response = await service.http.get(PATH + "x", headers={"X-Request-Id": request_id})
            return response.headers["x-request-id"]

        assert await id_of("mine-1") == "mine-1"
        generated_ids = [await id_of(request_id) for request_id in ("two words", "x" * 200, "")]
        assert len(set(generated_ids)) == 3 and not {"two words", ""} & set(generated_ids)


async def test_only_who_asks_for_times_is_sure_to_hear_its_id(night: NightConfig, users: list[str]) -> None:
    """As docs/how-to/find-out-why.md has it: what lies ready is sent past whoever would tell the id."""
    mine = {"X-Request-Id": "mine"}
    async with serving(night) as service:

        async def ids(headers: dict[str, str]) -> list[str | None]:
            responses = [await service.http.get(PATH + users[0], headers=headers) for _ in range(3)]
            return [response.headers.get("x-request-id") for response in responses]

        assert await ids(mine) == ["mine", "mine", None]  # from Redis, from a record, ready
        assert await ids({**mine, "X-Larder-Timing": "1"}) == ["mine"] * 3


async def test_a_request_has_a_span_below_its_callers_with_one_for_every_stage(
    night: NightConfig, users: list[str], exporter: InMemorySpanExporter
) -> None:
    headers = {"traceparent": SAMPLED, "tracestate": "a=1", "X-Request-Id": "mine"}
    body = {"entities": [{"id": "traced", "history": histories(night)[users[0]]}, users[0]]}
    async with serving(night, traces=True, traces_share=0.0) as service:
        answer = await service.http.post("/v1/lookup/user_topk", json=body, headers=headers)
        generation = answer.json()["answers"][0]["generation"]

    spans = named(exporter)
    assert set(spans) == {
        "POST /v1/lookup/{table}", "larder.parse", "larder.stored", "larder.live"
    }  # fmt: skip
    request, live = spans["POST /v1/lookup/{table}"], spans["larder.live"]
    assert request.parent is not None and request.parent.is_remote
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, SPAN)
    assert request.context.trace_state == {"a": "1"} and request.kind == SpanKind.SERVER
    assert request.attributes is not None and live.attributes is not None
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/lookup/{table}",
        "http.response.status_code": 200,
        "larder.request_id": "mine",
        "larder.table": "user_topk",
        "larder.generation": generation,
        "larder.entities": 2,
        "larder.answers.live": 1,
        "larder.answers.l2": 1,
    }
    assert live.attributes["larder.entities"] == 1
    assert live.attributes["larder.generation"] == generation
    for name, span in spans.items():
        if span is not request:
            assert span.parent == request.context, name
            assert request.start_time <= span.start_time <= span.end_time  # type: ignore[operator]
            assert span.end_time <= request.end_time  # type: ignore[operator]
    assert request.resource.attributes["service.name"] == "larder"


async def test_what_is_traced_is_traced_from_l1_too_and_names_entities_only_on_demand(
    night: NightConfig, users: list[str], exporter: InMemorySpanExporter
) -> None:
    for with_ids in (False, True):
        exporter.clear()
        async with serving(night, traces=True, traces_ids=with_ids) as service:
            for _ in range(3):
                await service.http.get(PATH + users[0], headers={"traceparent": UNSAMPLED})
            assert not exporter.get_finished_spans()
            await service.http.get(PATH + users[0], headers={"traceparent": SAMPLED})
        (span,) = exporter.get_finished_spans()
        assert span.attributes is not None and span.attributes["larder.source"] == "l1"
        assert span.attributes.get("larder.entity") == (users[0] if with_ids else None)
        assert with_ids or users[0] not in span.to_json()


async def test_a_share_of_the_others_begins_a_trace_whatever_broken_header_came(
    night: NightConfig, users: list[str], exporter: InMemorySpanExporter
) -> None:
    async with serving(night, traces=True, traces_share=1.0) as service:
        for traceparent in ("", "00-broken", SAMPLED.upper(), f"ff{SAMPLED[2:]}"):
            await service.http.get(PATH + users[0], headers={"traceparent": traceparent, "tracestate": "a=1"})
        await service.http.get("/metrics")
        await service.http.get("/healthz")
    requests = [span for span in exporter.get_finished_spans() if span.kind == SpanKind.SERVER]

    assert len(requests) == 4 and len({span.context.trace_id for span in requests}) == 4
    assert all(span.parent is None and not span.context.trace_state for span in requests)
    assert f"{requests[0].context.trace_id:032x}" != TRACE


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's URL and what it was sent."""
    received: list[ExportTraceServiceRequest] = []
    handler = type("Own", (Collector,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join(10)


async def test_spans_travel_over_the_wire_before_the_service_is_gone(
    night: NightConfig, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "of-the-test")
        async with serving(night, traces=True) as service:
            await service.http.get(PATH + users[1], headers={"traceparent": SAMPLED})
    spans = [
        (resource, span)
        for export_request in received
        for resource in export_request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    request = next(span for _, span in spans if span.name.startswith("GET"))

    assert request.trace_id.hex() == TRACE and request.parent_span_id.hex() == SPAN
    assert {span.name for _, span in spans} == {"GET /v1/lookup/{table}/{entity}", "larder.stored"}
    resource_attributes = {attribute.key: attribute.value.string_value for attribute in spans[0][0].resource.attributes}
    assert resource_attributes["service.name"] == "of-the-test"


async def test_a_collector_that_is_away_delays_no_answer(
    night: NightConfig, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("serving.tracing.otel_spans._CLOSE_TIMEOUT_S", 0.2)
    async with serving(night, traces=True, traces_share=1.0) as service:
        assert (await service.get(PATH + users[0]))["id"] == users[0]


def test_while_it_is_off_no_span_and_no_exporter_is_even_imported() -> None:
    code = (
        "import sys, serving.app; from serving.config.settings import ServingConfig;"
        "serving.app.create_app(ServingConfig()); print(*sys.modules)"
    )
    completed_process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
        check=True,
    )  # fmt: skip
    imported = set(completed_process.stdout.split())

    # redis-py itself imports OpenTelemetry's API if it is installed.
    assert "serving.tracing.observer" in imported and "serving.tracing.otel_spans" not in imported
    assert not [module_name for module_name in imported if module_name.startswith("opentelemetry.exporter")]


async def test_a_server_error_is_logged_with_its_request_and_its_trace(
    night: NightConfig, users: list[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async with serving(night) as service:

        async def broken(*_: object) -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(attached(service.service, Explainer), "explain", broken, raising=False)
        with caplog.at_level(logging.INFO):
            headers = {"X-Request-Id": "mine", "traceparent": SAMPLED}
            response = await service.http.get(f"/v1/explain/user_topk/{users[0]}", headers=headers)
    request_records = [record for record in caplog.records if record.name == request_log.name]

    assert response.status_code == 500 and len(request_records) == 1 and request_records[0].levelname == "ERROR"
    fields = request_records[0].larder_fields  # type: ignore[attr-defined]
    assert (fields["request_id"], fields["trace_id"], fields["status"]) == ("mine", TRACE, 500)
    assert users[0] not in str(fields) + request_records[0].getMessage()


def test_a_program_writes_json_lines_without_its_token_or_password(
    night: NightConfig, users: list[str], own_redis: RedisServer, tmp_path: Path
) -> None:
    import redis

    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "hush-hush")
    url = own_redis.url.replace("://", "://:hush-hush@")
    environ = environment(night, tmp_path, REDIS_URL=url, LARDER_TOKEN="t0k3n", LARDER_LOG="json", LARDER_LOG_SHARE="1")
    with started(environ, tmp_path / "log") as (process, at):
        ok = {"Authorization": "Bearer t0k3n", "X-Request-Id": "mine"}
        assert httpx.get(f"{at}{PATH}{users[0]}", headers=ok).status_code == 200
        assert httpx.get(f"{at}{PATH}{users[0]}").status_code == 401
        process.terminate()
        process.wait(20)
    text = (tmp_path / "log").read_text()
    lines = [orjson.loads(line) for line in text.splitlines()]

    assert "t0k3n" not in text and "hush-hush" not in text and users[0] not in text
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    requests = [log_record for log_record in lines if log_record["logger"] == "larder.requests"]
    assert [log_record["status"] for log_record in requests if "table" in log_record] == [200, 401]
    assert requests[0]["request_id"] == "mine"
    assert any(log_record["logger"].startswith("uvicorn") for log_record in lines)
