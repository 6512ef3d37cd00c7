"""OpenTelemetry spans of requests, built from a request's record at its end. Imported only if enabled."""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import MutableMapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from serving.requests.request_record import ParentSpan, RequestFacts, RequestRecord
from serving.tracing.response_peek import count_sources, find_generation

_TRACED_KEY = "larder.traced"
_TRACED_PATH_PREFIX = "/v1/"
_CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Spans:
    """Tracer of requests. `share`: share of requests without a parent that are traced; others follow their parent.

    Spans are queued in bounded memory and sent by a thread of the SDK; spans that do not fit are dropped.
    """

    def __init__(
        self, processor: SpanProcessor, *, trace_share: float, with_entity_ids: bool, instance_id: str
    ) -> None:
        self._provider = TracerProvider(resource=_resource(instance_id), sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("larder.serving")
        self._sampled_share = trace_share
        self._with_entity_ids = with_entity_ids

    @classmethod
    def exporting(cls, *, trace_share: float, with_entity_ids: bool, instance_id: str) -> "Spans":
        """Create spans exported over OTLP/HTTP, as set in the environment (OTEL_EXPORTER_OTLP_ENDPOINT etc.)."""
        processor = BatchSpanProcessor(OTLPSpanExporter())
        return cls(processor, trace_share=trace_share, with_entity_ids=with_entity_ids, instance_id=instance_id)

    def decide_traced(self, scope: MutableMapping[str, Any], parent: ParentSpan | None) -> bool:
        """Return whether the request is traced; cached in `scope`, since fast path and observer both need it."""
        is_traced: bool | None = scope.get(_TRACED_KEY)
        if is_traced is None:
            is_traced = scope["path"].startswith(_TRACED_PATH_PREFIX) and (
                random.random() < self._sampled_share if parent is None else parent.is_sampled
            )
            scope[_TRACED_KEY] = is_traced
        return is_traced

    def begin(self, request_record: RequestRecord) -> Span:
        """Begin the request's span, a child of the caller's, and store its ids in `request_record` for the log."""
        span = self._tracer.start_span(
            "request",
            context=_parent_context(request_record.parent),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - round((time.monotonic() - request_record.request_started_at) * 1e9),
        )
        ids = span.get_span_context()
        request_record.trace_and_span_ids = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
        return span

    def end(self, span: Span, request_record: RequestRecord, request: RequestFacts, request_seconds: float) -> None:
        """End the span after the request's duration, with a child for each stage: `parse`, `stored` (L2), `live`..."""
        now_ns, monotonic_s = time.time_ns(), time.monotonic()

        def epoch_ns(monotonic_moment_s: float) -> int:
            return now_ns - round((monotonic_s - monotonic_moment_s) * 1e9)

        shared_attributes = _shared_attributes(request_record, request)
        span.update_name(f"{request.http_method} {request.route}")
        span.set_attributes(shared_attributes | _request_attributes(request_record, request))
        if self._with_entity_ids and request.entity_id is not None:
            span.set_attribute("larder.entity", request.entity_id)
        if request_record.http_status >= 500 or not request_record.http_status:
            span.set_status(Status(StatusCode.ERROR))
        span_context = set_span_in_context(span, Context())
        for stage in request_record.stage_times:
            stage_span = self._tracer.start_span(
                f"larder.{stage.stage_name}",
                context=span_context,
                start_time=epoch_ns(stage.ended_at - stage.stage_seconds),
                attributes={**shared_attributes, "larder.entities": stage.entity_count}
                if stage.entity_count
                else shared_attributes,
            )
            stage_span.end(epoch_ns(stage.ended_at))
        span.end(epoch_ns(request_record.request_started_at + request_seconds))

    async def aclose(self) -> None:
        """Send the queued spans within a few seconds, so that an unreachable collector does not block the stop."""
        closed_event = asyncio.Event()
        loop = asyncio.get_running_loop()

        def close() -> None:
            try:
                self._provider.shutdown()
            except Exception:  # errors of the exporter must not prevent the service from ending
                log.warning("spans could not be sent at the end", exc_info=True)
            finally:
                with contextlib.suppress(RuntimeError):  # the event loop waited long enough, and is closed
                    loop.call_soon_threadsafe(closed_event.set)

        threading.Thread(target=close, name="larder-spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closed_event.wait(), _CLOSE_TIMEOUT_S)


def _resource(instance_id: str) -> Resource:
    """Return the resource of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES; the service's default name is `larder`."""
    resource = Resource.create({"service.instance.id": instance_id})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        return resource.merge(Resource({"service.name": "larder"}))
    return resource


def _parent_context(parent: ParentSpan | None) -> Context:
    if parent is None:
        return Context()
    parent_span_context = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.trace_flags),
        trace_state=TraceState.from_header([parent.tracestate]) if parent.tracestate else None,
    )
    return set_span_in_context(NonRecordingSpan(parent_span_context), Context())


def _shared_attributes(request_record: RequestRecord, request: RequestFacts) -> dict[str, str | int]:
    """Return the attributes that every span of a request carries."""
    generation = find_generation(request_record.last_body_piece)
    value_by_attribute = {"larder.table": request.table_name, "larder.generation": generation}
    return {
        attribute_name: attribute_value
        for attribute_name, attribute_value in value_by_attribute.items()
        if attribute_value is not None
    }


def _request_attributes(request_record: RequestRecord, request: RequestFacts) -> dict[str, str | int]:
    """Return the attributes of the request's span, named by OpenTelemetry's conventions where possible."""
    count_by_source = count_sources(request_record.last_body_piece)
    attributes: dict[str, str | int] = {
        "http.request.method": request.http_method,
        "http.route": request.route,
        "http.response.status_code": request_record.http_status,
        "larder.request_id": request_record.request_id,
    }
    if count_by_source:
        attributes["larder.entities"] = sum(count_by_source.values())
        attributes |= {f"larder.answers.{source}": count for source, count in count_by_source.items()}
        if len(count_by_source) == 1:
            attributes["larder.source"] = next(iter(count_by_source))
    return attributes
