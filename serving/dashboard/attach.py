"""Attachment of the dashboard to a replica: its page, its document, and the state of this worker."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response

from serving.dashboard.counters import Counts, collect_counts
from serving.dashboard.document import DASHBOARD_SCHEMA
from serving.dashboard.generation_history import GenerationHistory
from serving.dashboard.service import Dashboard
from serving.http.openapi import Operation
from serving.http.static_files import StaticPage
from serving.replica.hooks import Replica
from serving.requests.errors import ErrorCode
from serving.requests.negotiation import JSON_MEDIA_TYPE
from serving.requests.options import Limits

DASHBOARD_PAGE = StaticPage("/dashboard", "serving.dashboard", "page")
"""Page without data: its numbers come from `/dashboard/data`."""


def operations(_limits: Limits) -> tuple[Operation, ...]:
    """Return the operation from which the page gets its numbers."""
    return (
        Operation(
            method="get",
            path="/dashboard/data",
            operation_id="getDashboard",
            tag="operation",
            summary="Numbers of the dashboard",
            description="Counts of all workers and replicas over the last hour.",
            answer_schema=DASHBOARD_SCHEMA,
            answer_example={
                "now": 1795174289.5,
                "whole": True,
                "trouble": None,
                "verdict": {"level": "ok", "sentence": "All is well.", "advice": None, "also": []},
            },
            error_code_by_name={"dashboard_off": ErrorCode(404, "The dashboard is switched off here")},
            is_counted=False,  # the dashboard's own requests are not counted
            scope="admin",
        ),
    )


def attach(replica: Replica) -> Dashboard:
    """Publish this worker's counts, and show those of all workers; features add reports by `Hooks.report_by_name`."""
    config, own_namespace, hooks, metrics = (replica.config, replica.own_namespace, replica.hooks, replica.metrics)
    admission, l1_cache = replica.admission, replica.l1_tier

    def read_counts() -> Counts:
        count_by_field = collect_counts(metrics, sum(admission.shed_counts.values()))
        for read_feature_counts in hooks.count_readers:
            count_by_field.update(read_feature_counts())
        return count_by_field

    def read_report(report_name: str) -> Any:
        provider = hooks.report_by_name.get(report_name)
        return None if provider is None else provider()

    def find_problem(feature_name: str) -> str | None:
        provider = hooks.problem_by_name.get(feature_name)
        return None if provider is None else provider()

    def read_worker_state() -> Mapping[str, Any]:
        """Return the state of this worker."""
        served, health = own_namespace.follower.served, own_namespace.follower.health
        return {
            "replica": replica.fleet_name,
            "generation": None if served is None else served.live.generation,
            "epoch": None if served is None else served.live.epoch,
            "ready": health.is_ready,
            "stale": health.stale_reason,
            "degraded": health.degraded_reason,
            "failed": health.failure_reason,
            "tokens_stale": find_problem("tokens"),
            "tls_stale": find_problem("tls"),
            "store_problem": replica.store_watch.problem,
            "canary_problem": own_namespace.follower.canary_problem,
            "breaker": own_namespace.components.remote.stats.breaker_state,
            "live_queued": replica.batcher.queued,
            "under_way": admission.requests_under_way,
            "requests_max": admission.requests_max,
            "queue_seconds": round(admission.loop_valve.interval_wait, 4),
            "l1_bytes": l1_cache.size_bytes,
            "l1_budget_bytes": l1_cache.max_bytes,
            "l1_entries": len(l1_cache),
        }

    dashboard = Dashboard(
        own_namespace.components.remote.control, GenerationHistory(own_namespace.store, replica.releases.read_records),
        worker_name=replica.replica_name, is_dashboard_on=config.observe and config.dashboard_s > 0,
        read_counts=read_counts,
        read_worker_state=read_worker_state, bucket_bounds=metrics.answer_seconds.bounds, nights=replica.nights,
        clock=own_namespace.clock,
        advisor=lambda: read_report("advisor"), quality=lambda: read_report("quality"),
        list_experiments=lambda: read_report("arms") or (), events=lambda: read_report("events"),
        in_thread=replica.in_thread,
    )  # fmt: skip
    if dashboard.is_on:
        own_namespace.refresher.add_periodic("dashboard", config.dashboard_s, dashboard.publish)

    async def answer_data(_request: Request, _request_started_at: float) -> object:
        body = await dashboard.document_json()
        return Response(body, media_type=JSON_MEDIA_TYPE, headers={"Cache-Control": "no-store"})

    hooks.handlers["getDashboard"] = answer_data
    hooks.page_routes += DASHBOARD_PAGE.routes()
    hooks.close_steps.append(dashboard.aclose)
    return dashboard
