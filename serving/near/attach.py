"""Attachment of near matches to a replica: live inference reuses answers in the configured tables."""

from serving.generations.snapshot import Snapshot
from serving.near.near_matches import NearMatches, NearMetrics
from serving.replica.hooks import Replica
from serving.replica.namespace import HeldNamespace


def attach(replica: Replica) -> NearMatches | None:
    """Reuse answers for near inputs in all namespaces; None if no table is configured for it."""
    if not replica.config.near:
        return None
    near_matches = NearMatches(replica.config.near)

    def warn_of(snapshot: Snapshot) -> Snapshot:
        near_matches.check(snapshot)
        return snapshot

    def reuse_in(namespace: HeldNamespace) -> None:
        namespace.components.inferences.near_reuse_tables = frozenset(namespace.config.near)
        namespace.openers.append(warn_of)

    replica.inference.reuse = near_matches
    reuse_in(replica.own_namespace)
    replica.hooks.namespace_hooks.append(reuse_in)
    replica.metrics.registry.register(NearMetrics(near_matches))
    return near_matches
