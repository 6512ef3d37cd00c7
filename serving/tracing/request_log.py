"""The log of requests: every error and every slow one, and of the others a sample."""

import logging
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from serving.tracing.log_setup import FIELDS
from serving.tracing.request_context import RequestFacts, RequestRecord
from serving.tracing.response_peek import sources_of

log = logging.getLogger("larder.requests")


@dataclass(frozen=True, slots=True, eq=False)
class RequestLog:
    """Log of requests without ready answers from L1: nothing is decided or written for each hit."""

    _: KW_ONLY
    sampled_share: float
    slow_s: float
    draw: Callable[[], float] = random.random

    def level(self, request_record: RequestRecord, seconds: float) -> int | None:
        """Log level: errors and slow requests have their own, so that no sample crowds them out; None: no line."""
        if request_record.status >= 500:
            return logging.ERROR
        if seconds >= self.slow_s:
            return logging.WARNING
        return logging.INFO if self.draw() < self.sampled_share else None

    def write(
        self, level: int, request_record: RequestRecord, request: RequestFacts, seconds: float
    ) -> None:
        """Writes one line, unless the request is a readiness probe: that tells a state, as it should."""
        if request.route != "/readyz" and log.isEnabledFor(level):
            fields = {FIELDS: fields_of(request_record, request, seconds)}
            log.log(level, "%s %s", request.method, request.route, extra=fields)


def fields_of(
    request_record: RequestRecord, request: RequestFacts, seconds: float
) -> dict[str, Any]:
    """Fields of the request's line; none of them is an entity's id."""
    fields: dict[str, Any] = dict(request_record.ids())
    if request.table is not None:
        fields["table"] = request.table
    if request_record.caller:
        fields["token"] = request_record.caller
    fields |= {"status": request_record.status, "seconds": round(seconds, 6)}
    if sources := sources_of(request_record.body):
        fields["sources"] = sources
    if stages := request_record.by_stage():
        fields["stages"] = {name: round(stage_s, 6) for name, stage_s in stages.items()}
    return fields
