"""Attachment of usage to a replica: hot ids of all replicas, and advice on the size of L1."""

from cache.usage.hot_keys import SharedHotKeys
from serving.metrics.collectors import InternalCounters
from serving.replica.hooks import Replica
from serving.replica.namespace import HeldNamespace
from serving.usage.hot_keys import HELP_BY_EVENT, HotKeySketch
from serving.usage.l1_advisor import L1Advisor


def attach(replica: Replica) -> L1Advisor:
    """Report hot ids to Redis, warm L1 with those of all replicas, and maintain the hit-ratio curve of L1."""
    own_namespace = replica.own_namespace
    sketch = share_hot_ids(own_namespace)
    replica.hooks.namespace_hooks.append(share_hot_ids)
    advisor = L1Advisor(
        own_namespace.components.tiers, lambda: own_namespace.holder.live, replica.config.sampled_keys_max
    )
    if advisor.step_s:
        own_namespace.refresher.add_periodic("l1_advisor", advisor.step_s, advisor.step)
    replica.metrics.registry.register(advisor)
    replica.metrics.registry.register(InternalCounters(sketch.internal_counters, HELP_BY_EVENT))
    replica.hooks.report_by_name["advisor"] = advisor.to_json
    return advisor


def share_hot_ids(namespace: HeldNamespace) -> HotKeySketch:
    """Let a namespace share its hot ids with all replicas, unless the settings forbid it."""
    recent_names, holder, sketch_s = (
        namespace.components.ladder.recent_names,
        namespace.holder,
        namespace.config.sketch_s,
    )
    sketch = HotKeySketch(
        SharedHotKeys(namespace.components.remote.control), recent_names, lambda: holder.live, namespace.clock
    )
    if sketch_s:
        namespace.warmup.get_shared_hot_names = sketch.hottest_names
        namespace.refresher.add_periodic("hot_ids", sketch_s, sketch.report)
    return sketch
