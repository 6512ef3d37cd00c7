"""Counters that others keep as plain numbers, read when they are scraped."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

TEXTS: Mapping[str, str] = {
    "l2_reads": "Records asked of Redis",
    "l2_batches": "Pipelines sent to Redis",
    "l2_shed": "Reads not sent, because too much was under way",
    "breaker_opened": "How often Redis was left alone after failures in a row",
    "flights_shared": "Reads that joined one under way",
    "inferences_shared": "Inputs that joined an inference under way",
    "inferences_hopeless": "Inputs that could not have been answered in time",
    "overlays_spared": "Live answers not looked up in Redis, because inputs hardly come again",
    "overlays_stored": "Live answers written to Redis",
    "overlays_failed": "Live answers that Redis did not take",
    "overlays_dropped": "Live answers not written, because too many waited",
    "hot_reported": "Ids added to the sketch of what is asked for most",
    "hot_reports_failed": "Reports to that sketch that failed",
    "cold_reported": "Ids added to the sketch of those asked for in vain",
    "cold_reports_failed": "Reports to that sketch that failed",
    "reads_left_out": "Reads not counted towards who was read at all",
    "leases_led": "Cold answers computed here while others waited",
    "leases_waited": "Cold answers that another replica was computing",
    "leases_adopted": "Cold answers taken over from another replica",
    "leases_taken_over": "Leases of a replica that fell silent, taken over",
    "leases_timed_out": "Cold answers computed after waiting in vain",
    "exposures_written": "Keys of experiments written into the exposure log",
    "exposures_dropped": "Keys of experiments not written down, because too many waited",
    "exposure_writes_failed": "Failed tries to write a part of the exposure log",
    "leases_unavailable": "Cold answers computed without a lease",
}
"""Help text by event; each is a family of its own: a sum over all of them would mean nothing."""


F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def by_label(family: F, samples: Mapping[str, float]) -> F:
    """The family of one label, with a sample for each of its values."""
    for value, number in samples.items():
        family.add_metric([value], number)
    return family


class InternalCounters(Collector):
    """Collector of what the tiers did besides answering: `larder_<name>_total`."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Counter families, one for each event."""
        for event, count in self._read().items():
            yield CounterMetricFamily(f"larder_{event}", TEXTS.get(event, event), value=count)
