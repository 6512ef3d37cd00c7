"""The generations that a replica holds, for people and dashboards. Pure."""

from typing import Any

from cache.store.releases import Canary
from serving.generations.health import Health
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot


def overview(served: ServedGenerations, health: Health, canary: Canary | None) -> dict[str, Any]:
    """The body of GET /v1/generations; `next` is held ready, for a publish or as the canary."""
    previous, next_ = served.previous, served.next
    return {
        "live": _snapshot(served.live),
        "previous": None if previous is None else _snapshot(previous),
        "next": None if next_ is None else _snapshot(next_),
        "canary": canary
        and {"generation": canary.generation, "percent": canary.percent, "since": canary.since},
        "blocklist": {
            "version": served.live.blocklist.version,
            "items": len(served.live.blocklist.items),
            "entities": len(served.live.blocklist.entities) + len(served.live.blocklist.users),
        },
        "ready": health.ready,
        "stale": health.stale,
        "degraded": health.degraded,
        "failed": health.failed,
    }


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    precisions = {} if snapshot.predictor is None else snapshot.predictor.precisions
    providers = {} if snapshot.predictor is None else snapshot.predictor.providers
    return {
        "generation": snapshot.generation,
        "epoch": snapshot.epoch,
        "published_at": snapshot.published_at,
        "data_until": manifest.data_until,
        "entities": {name: entity_set.count for name, entity_set in manifest.entity_sets.items()},
        "tables": {
            name: {
                "kind": table.kind,
                "entity": table.entity,
                "width": table.layout.width,
                "producer": table.producer.kind,
                "labels": table.labels,
            }
            for name, table in manifest.tables.items()
        },
        "models": {
            name: {
                "digest": model.digest,
                # What runs here, which is fp32 where the night could not quantize.
                "precision": precisions.get(name),
                "provider": providers.get(name),
                "fp32_bytes": sum(model_file.size_bytes for model_file in model.fp32_files),
                "int8_bytes": None if model.int8 is None else model.int8.size_bytes,
                "agreement": dict(model.agreement),
            }
            for name, model in manifest.models.items()
        },
        "fallback": snapshot.fallback,
        "indexes": {
            name: {"kind": index.kind, "recall": index.recall, "size_bytes": index.file.size_bytes}
            for name, index in manifest.indexes.items()
        },
    }
