"""Observers of a running service, as its settings have it."""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Container
from typing import TYPE_CHECKING

from starlette.types import Scope

from cache.errors import ConfigError
from cache.process.extras import install_command
from serving.config.settings import ServingConfig
from serving.http.service import Service
from serving.tracing.observer import RequestObserver
from serving.tracing.request_log import RequestLog
from serving.tracing.trace_context import parent_of

if TYPE_CHECKING:
    from serving.tracing.otel_spans import Spans

Traced = Callable[[Scope], bool]
"""Judge of whether a request is traced."""


@contextlib.asynccontextmanager
async def watched(
    config: ServingConfig, service: Service, instance: str
) -> AsyncIterator[tuple[RequestObserver, Traced | None]]:
    """The watch over requests, and what tells which are traced; without traces OpenTelemetry is not imported."""
    spans = _spans(config, instance) if config.traces else None

    def tables() -> Container[str]:
        served = service.follower.served
        return () if served is None else served.live.manifest.tables

    watch = RequestObserver(
        tables,
        times=config.server_timing,
        journal=RequestLog(sampled_share=config.log_share, slow_s=config.log_slow_ms / 1000),
        tracer=spans,
    )
    try:
        yield watch, None if spans is None else functools.partial(_is_traced, spans)
    finally:
        if spans is not None:
            await spans.aclose()


def _is_traced(spans: "Spans", scope: Scope) -> bool:
    traceparents = [value for name, value in scope["headers"] if name == b"traceparent"]
    return spans.judged(scope, parent_of(traceparents))


def _spans(config: ServingConfig, instance: str) -> "Spans":
    try:
        from serving.tracing.otel_spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"LARDER_TRACES needs OpenTelemetry ({error}): {install_command('otel')}",
            field="traces",
        ) from error
    return Spans.exporting(
        trace_share=config.traces_share, with_ids=config.traces_ids, instance=instance
    )
