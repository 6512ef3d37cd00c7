"""Attachment of the dashboard to a replica: its page, its document, and the state of this worker."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response

from serving.dashboard.counters import Counts, collect_counts
from serving.dashboard.document import DASHBOARD
from serving.dashboard.generation_history import GenerationHistory
from serving.dashboard.service import Dashboard
from serving.http.openapi import Operation
from serving.http.static_files import StaticPage
from serving.replica.hooks import Replica
from serving.requests.errors import ErrorCode
from serving.requests.negotiation import JSON_MEDIA_TYPE
from serving.requests.options import Limits

PAGE = StaticPage("/dashboard", "serving.dashboard", "page")
"""Page without data: its numbers come from `/dashboard/data`."""


def operations(_limits: Limits) -> tuple[Operation, ...]:
    """Return the operation that the page asks for its numbers."""
    return (
        Operation(
            method="get",
            path="/dashboard/data",
            operation_id="getDashboard",
            tag="operation",
            summary="Numbers of the dashboard",
            description="What all workers and replicas count, over the last hour.",
            answer_schema=DASHBOARD,
            answer_example={
                "now": 1795174289.5,
                "whole": True,
                "trouble": None,
                "verdict": {"level": "ok", "sentence": "All is well.", "advice": None, "also": []},
            },
            codes={"dashboard_off": ErrorCode(404, "The dashboard is switched off here")},
            is_counted=False,  # who looks on is not what is looked at
            scope="admin",
        ),
    )


def attach(replica: Replica) -> Dashboard:
    """Publish the counts of this worker, and show those of all; other features add theirs by `Hooks.reports`."""
    config, own, hooks, metrics = replica.config, replica.own, replica.hooks, replica.metrics
    admission, local = replica.admission, replica.local

    def read_counts() -> Counts:
        counts = collect_counts(metrics, sum(admission.shed_counts.values()))
        for read in hooks.counts:
            counts.update(read())
        return counts

    def report(name: str) -> Any:
        provider = hooks.reports.get(name)
        return None if provider is None else provider()

    def about() -> Mapping[str, Any]:
        """Return the state of this worker."""
        served, health = own.follower.served, own.follower.health
        return {
            "replica": replica.fleet_name,
            "generation": None if served is None else served.live.generation,
            "epoch": None if served is None else served.live.epoch,
            "ready": health.ready,
            "stale": health.stale,
            "degraded": health.degraded,
            "failed": health.failed,
            "breaker": own.components.remote.stats.breaker,
            "live_queued": replica.batcher.queued,
            "under_way": admission.requests_under_way,
            "requests_max": admission.requests_max,
            "queue_seconds": round(admission.loop_valve.interval_wait, 4),
            "l1_bytes": local.size_bytes,
            "l1_budget_bytes": local.max_bytes,
            "l1_entries": len(local),
        }

    dashboard = Dashboard(
        own.components.remote.control, GenerationHistory(own.store, replica.releases.read_records),
        name=replica.name, is_on=config.observe and config.dashboard_s > 0, read_counts=read_counts,
        about=about, bounds=metrics.answer_seconds.bounds, nights=replica.nights, clock=own.clock,
        advisor=lambda: report("advisor"), quality=lambda: report("quality"),
        arms=lambda: report("arms") or (), events=lambda: report("events"),
        in_thread=replica.in_thread,
    )  # fmt: skip
    if dashboard.is_on:
        own.refresher.add_periodic("dashboard", config.dashboard_s, dashboard.publish)

    async def data(_request: Request, _started: float) -> object:
        body = await dashboard.data()
        return Response(body, media_type=JSON_MEDIA_TYPE, headers={"Cache-Control": "no-store"})

    hooks.handlers["getDashboard"] = data
    hooks.pages += PAGE.routes()
    hooks.close.append(dashboard.aclose)
    return dashboard
