"""Observers of a running service, as its settings have it."""

import contextlib
from collections.abc import AsyncIterator, Container, MutableMapping
from typing import TYPE_CHECKING, Any

from cache.errors import ConfigError
from serving.config.settings import ServingConfig
from serving.fast_lookup.dispatcher import Hot, Messages
from serving.http.service import Service
from serving.tracing.observer import Watch
from serving.tracing.request_log import RequestLog
from serving.tracing.trace_context import parent_of

if TYPE_CHECKING:
    from serving.tracing.otel_spans import Spans


class TracedHot(Hot):
    """Hot route that leaves traced requests to the path that is watched."""

    def __init__(self, service: Service, spans: "Spans") -> None:
        super().__init__(service)
        self._spans = spans

    def ready(self, scope: MutableMapping[str, Any]) -> Messages | None:
        """The ready answer to a request that is not traced; None for one that is, or has none."""
        sent = [value for name, value in scope["headers"] if name == b"traceparent"]
        return None if self._spans.judged(scope, parent_of(sent)) else super().ready(scope)


@contextlib.asynccontextmanager
async def watched(
    config: ServingConfig, service: Service, instance: str
) -> AsyncIterator[tuple[Hot, Watch]]:
    """The hot route, and the watch over what lies below it; without traces OpenTelemetry is not even imported."""
    spans = _spans(config, instance) if config.traces else None

    def tables() -> Container[str]:
        held = service.follower.holding
        return () if held is None else held.live.manifest.tables

    watch = Watch(
        tables,
        times=config.server_timing,
        journal=RequestLog(share=config.log_share, slow_s=config.log_slow_ms / 1000),
        tracer=spans,
        timer=service.timer,
    )
    try:
        yield Hot(service) if spans is None else TracedHot(service, spans), watch
    finally:
        if spans is not None:
            await spans.aclose()


def _spans(config: ServingConfig, instance: str) -> "Spans":
    try:
        from serving.tracing.otel_spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"LARDER_TRACES needs OpenTelemetry ({error}): pip install 'larder[otel]'",
            field="traces",
        ) from error
    return Spans.exporting(share=config.traces_share, with_ids=config.traces_ids, instance=instance)
