"""`python -m serving` whose model behaves as a file says, with metrics of its resources: started by tests only.

The file holds "ok", "slow SECONDS" or "broken"; without it the model is left alone.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.model.predictor import Predictor
from serving.__main__ import main
from serving.metrics.registry import Metrics

RESOURCE_METRIC = "troubled_held"
FAULT_FILE = "TROUBLED_MODEL"
_STATUS = ("RssAnon", "Threads")


class ResourceCollector(Collector):
    """Tasks, descriptors and private memory of this process when it is scraped."""

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One family."""
        family = GaugeMetricFamily(RESOURCE_METRIC, "What this process holds", labels=["what"])
        try:
            family.add_metric(["tasks"], len(asyncio.all_tasks()))
        except RuntimeError:  # no loop runs yet
            return
        family.add_metric(["descriptors"], len(list(Path("/proc/self/fd").iterdir())))
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in _STATUS:
                family.add_metric([name], float(value.split()[0]))
        yield family


def held_of(exposed: str) -> dict[str, float]:
    """Return the values of `ResourceCollector` by name from exposed metrics."""
    lines = [line for line in exposed.splitlines() if line.startswith(RESOURCE_METRIC + "{")]
    sample_parts = [line.removeprefix(RESOURCE_METRIC).rpartition(" ") for line in lines]
    return {labels.split('"')[1]: float(value) for labels, _, value in sample_parts}


def trouble(file: Path) -> None:
    """Make live inference follow the file; opening a generation is not affected."""
    real = Predictor.predict

    def predict(self: Predictor, *arguments: Any, **named: Any) -> Sequence[bytes]:
        if threading.current_thread().name.startswith("larder-live"):
            fault, _, seconds = file.read_text().partition(" ")
            if fault == "broken":
                raise RuntimeError("the model is broken, as it was told")
            if fault == "slow":
                time.sleep(float(seconds))
        return real(self, *arguments, **named)

    Predictor.predict = predict  # type: ignore[method-assign,assignment]


def expose_resources() -> None:
    """Add `ResourceCollector` to the metrics of the service."""
    real = Metrics.__init__

    def begin(self: Metrics) -> None:
        real(self)
        self.registry.register(ResourceCollector())

    Metrics.__init__ = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    expose_resources()
    if name := os.environ.get(FAULT_FILE):
        trouble(Path(name))
    sys.exit(main())
