"""Features of the service: the only module that names them.

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
    """Feature: how it attaches to a replica, and its operations of the API."""

    attach: Callable[[Replica], object]
    """Fills the hooks of a replica that is not started yet. Its result is kept for tests."""
    operations: Callable[[Limits], Sequence[Operation]] = _no_operations
    """Operations whose handlers `attach` provides."""


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
"""Features, attached in this order and closed in reverse."""


def all_operations(limits: Limits, features: Sequence[Feature] = FEATURES) -> list[Operation]:
    """Return the operations of the core and of these features."""
    operations = list(core_operations(limits))
    for feature in features:
        operations += feature.operations(limits)
    return operations
