"""Checks after the last call: nothing is under way, and the counts add up."""

from serving.engine.service import LookupService
from serving.http.routes import Service
from serving.metrics.registry import counts_of
from serving.requests.answers import STORED_SOURCES


class Broken(AssertionError):
    """A rule did not hold."""


def demand_nothing_left(name: str, service: LookupService) -> None:
    """Raise Broken if a process holds anything that no caller waits for."""
    inferences = service.ladder._inferences
    batcher = inferences.batcher  # type: ignore[attr-defined]
    leftover_counts = {
        "requests": service.admission.requests_under_way,
        "reads": len(service.tiers.flights),
        "inferences": len(inferences.flights),  # type: ignore[attr-defined]
        "jobs": len(inferences._job_by_flight_key),  # type: ignore[attr-defined]
        "inputs": batcher.queued, "bytes": batcher.queued_bytes,
        "busy workers": 1 - batcher._idle_worker_count,
        "leases": len(inferences.leases._written_at_by_mark),  # type: ignore[attr-defined]
        "overlays": len(service.tiers.write_behind),
    }  # fmt: skip
    if any(leftover_counts.values()):
        raise Broken(f"{name} holds for ever: {leftover_counts}")


def demand_sums(name: str, service: Service) -> None:
    """Raise Broken unless each requested entity has one source, and each miss one reason."""
    metrics = service.metrics
    metrics.settle()
    entity_count = sum(count for _, count in counts_of(metrics.entities))
    sources: dict[str, float] = {}
    for labels, count in counts_of(metrics.answers):
        sources[labels["source"]] = sources.get(labels["source"], 0) + count
    missed = sum(count for _, count in counts_of(metrics.misses))
    not_stored = sum(count for source, count in sources.items() if source not in STORED_SOURCES)
    if entity_count != sum(sources.values()) or missed != not_stored:
        raise Broken(f"{name}: {entity_count} asked, {sources} answered, {missed} with a reason")
