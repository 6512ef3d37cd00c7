"""Attachment of request observers to a replica; without traces OpenTelemetry is not imported."""

from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Scope

from cache.errors import ConfigError
from cache.process.command_line import install_command
from serving.config.settings import ServingConfig
from serving.replica.hooks import Replica
from serving.requests.request_record import parse_parent
from serving.tracing.observer import RequestLog, RequestObserver

if TYPE_CHECKING:
    from serving.tracing.otel_spans import Spans


def attach(replica: Replica) -> RequestObserver:
    """Answer requests under an observer; raise ConfigError if traces are on and OpenTelemetry is not installed."""
    config, hooks, follower = replica.config, replica.hooks, replica.own_namespace.follower
    spans = _open_spans(config, replica.replica_name) if config.traces else None

    def known_tables() -> Container[str]:
        served = follower.served
        return () if served is None else served.live.manifest.tables

    hooks.request_watch = observer = RequestObserver(
        known_tables,
        sends_server_timing=config.server_timing,
        journal=RequestLog(sampled_share=config.log_share, slow_after_s=config.log_slow_ms / 1000),
        tracer=spans,
    )
    if spans is not None:
        hooks.is_traced = partial(_is_traced, spans)
        hooks.stop_steps.append(spans.aclose)
    return observer


def _is_traced(spans: "Spans", scope: Scope) -> bool:
    traceparents = [header_value for header_name, header_value in scope["headers"] if header_name == b"traceparent"]
    return spans.decide_traced(scope, parse_parent(traceparents))


def _open_spans(config: ServingConfig, instance_id: str) -> "Spans":
    try:
        from serving.tracing.otel_spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"LARDER_TRACES needs OpenTelemetry ({error}): {install_command('otel')}", field="traces"
        ) from error
    return Spans.exporting(trace_share=config.traces_share, with_entity_ids=config.traces_ids, instance_id=instance_id)
