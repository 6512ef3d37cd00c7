"""Parts that a running service's features returned when they were attached."""

from typing import TypeVar

from serving.engine.service import LookupService
from serving.events.newer_events import NewerEvents
from serving.http.routes import Service

T = TypeVar("T")


def attached(service: Service, kind: type[T]) -> T:
    """The part of this class that a feature of the service returned."""
    return next(part for part in service.hooks.attached_features if isinstance(part, kind))


def newer_events_of(service: LookupService) -> NewerEvents:
    """Return the events that a service's answers count."""
    newer_inputs = service.ladder.newer_inputs
    assert isinstance(newer_inputs, NewerEvents)
    return newer_inputs
