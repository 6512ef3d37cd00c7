"""Attachment of answer quality to a replica: samples are computed again, and reads are counted."""

from serving.metrics.collectors import InternalCounters
from serving.quality.monitor import HELP_BY_EVENT, QualityMonitor
from serving.replica.hooks import Replica


def attach(replica: Replica) -> QualityMonitor:
    """Sample the answers of the own namespace, judge them in the background, and report on them."""
    own_namespace, hooks = replica.own_namespace, replica.hooks
    components = own_namespace.components
    monitor = QualityMonitor(
        replica.config, components.answer_observer, replica.metrics, replica.l1_tier, components.remote.control,
        own_namespace.holder, components.ladder.recent_names, replica.batcher, replica.admission, own_namespace.clock,
        replica.replica_name, replica.loops,
    )  # fmt: skip
    for loop_name, interval_s, step in monitor.periodic_steps():
        if interval_s:
            own_namespace.refresher.add_periodic(loop_name, interval_s, step)
    replica.metrics.registry.register(InternalCounters(monitor.internal_counters, HELP_BY_EVENT))
    hooks.report_by_name["quality"] = monitor.to_json
    hooks.start_steps.append(monitor.start)
    hooks.close_steps.append(monitor.aclose)
    return monitor
