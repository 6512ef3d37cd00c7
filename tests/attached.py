"""What the features of a running service gave when they were attached."""

from typing import TypeVar

from serving.http.routes import Service

T = TypeVar("T")


def attached(service: Service, kind: type[T]) -> T:
    """The part of this class that a feature of the service returned."""
    return next(part for part in service.hooks.attached if isinstance(part, kind))
