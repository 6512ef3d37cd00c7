"""Features of the service: the one list that names them.

To delete a feature, delete its package, its tests, its page, and its lines here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import serving.dashboard.attach as dashboard
import serving.events.attach as events
import serving.explain.attach as explain
import serving.filters.attach as filters
import serving.near.attach as near
import serving.quality.attach as quality
import serving.tracing.attach as tracing
import serving.traffic.attach as traffic
import serving.usage.attach as usage
from serving.http.openapi import Operation, core_operations
from serving.replica.hooks import Replica
from serving.requests.options import Limits


def _no_operations(_limits: Limits) -> Sequence[Operation]:
    return ()


class Feature(NamedTuple):
    """Feature as the core knows it: how it is attached to a replica, and its part of the API."""

    attach: Callable[[Replica], object]
    """Fills the hooks of a replica that is not started yet. What it returns is kept for tests."""
    operations: Callable[[Limits], Sequence[Operation]] = _no_operations
    """Operations whose handlers `attach` gives."""


FEATURES = (
    Feature(near.attach),
    Feature(filters.attach),
    Feature(usage.attach),
    Feature(quality.attach),
    Feature(dashboard.attach, dashboard.operations),
    Feature(traffic.attach, traffic.operations),
    Feature(events.attach, events.operations),
    Feature(explain.attach, explain.operations),
    Feature(tracing.attach),
)
"""Attached in this order, closed in reverse."""


def all_operations(limits: Limits, features: Sequence[Feature] = FEATURES) -> list[Operation]:
    """Return the operations of the core and of these features."""
    operations = list(core_operations(limits))
    for feature in features:
        operations += feature.operations(limits)
    return operations
