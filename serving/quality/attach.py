"""Attachment of answer quality to a replica: samples are computed again, and reads are counted."""

from serving.metrics.collectors import InternalCounters
from serving.quality.monitor import HELP_BY_EVENT, QualityMonitor
from serving.replica.hooks import Replica


def attach(replica: Replica) -> QualityMonitor:
    """Sample the answers of the own namespace, judge them in the background, and report on them."""
    own, hooks = replica.own, replica.hooks
    components = own.components
    monitor = QualityMonitor(
        replica.config, components.watch, replica.metrics, replica.local, components.remote.control,
        own.holder, components.ladder.recent_names, replica.batcher, replica.admission, own.clock,
        replica.name, replica.loops,
    )  # fmt: skip
    for loop_name, every_s, step in monitor.steps():
        if every_s:
            own.refresher.add_periodic(loop_name, every_s, step)
    replica.metrics.registry.register(InternalCounters(monitor.internal_counters, HELP_BY_EVENT))
    hooks.reports["quality"] = monitor.to_json
    hooks.start.append(monitor.start)
    hooks.close.append(monitor.aclose)
    return monitor
