"""The body of a lookup of one table, read and answered ahead of the router: a batch of ids, or the ladder's answers."""

from collections.abc import Callable

import orjson

from cache.errors import InvalidInput
from cache.format.manifest import Table
from serving.access.callers import spend
from serving.fast_lookup.batch import BatchLookups
from serving.generations.served_set import ServedGenerations
from serving.lookup.service import LookupService
from serving.rendering.answer_fields import JSON
from serving.rendering.batch_result import BatchRequest
from serving.requests import fast_parse, lookup_arrow
from serving.requests.content import LARGE, Scope, lookup_of, peek, refuse, run_in_thread_if_large
from serving.requests.errors import Problem
from serving.requests.models import LookupRequest, RequestOptions
from serving.requests.negotiation import Form, Forms

_JSON_BOTH = Forms("json", "json")


class PostedLookups:
    """Answers posted lookups as the routes do; None for what is refused, which is theirs to say."""

    def __init__(self, service: LookupService, clock: Callable[[], float]) -> None:
        self.batches = BatchLookups(service, clock)
        self._service = service

    async def answer(
        self,
        scope: Scope,
        body: bytes,
        form: Forms,
        table: Table,
        deadline_s: float,
        served: ServedGenerations,
        started: float,
    ) -> bytes | None:
        """The body of the response, in the form that is wanted; `deadline_s` is what the headers allow."""
        batch = self._batch(scope, body, form.request_form)
        if batch is None:
            if form != _JSON_BOTH:
                return None
            return await self._from_ladder(scope, body, table.name, deadline_s, served, started)
        if refuses(table, batch.k):
            return None
        try:
            spend(scope, len(batch.raws))
        except Problem as problem:
            refuse(scope, problem)
            return None
        options = RequestOptions(self._service.limits.deadline_ms / 1000, batch.k)
        options = fast_parse.tighter(options, deadline_s)
        lookup = BatchRequest(served, table, batch.raws, options, started)
        answered = self.batches.stream if form.response_form == "arrow" else self.batches.answer
        return await answered(lookup)

    def _batch(self, scope: Scope, body: bytes, form: Form) -> fast_parse.IdBatch | None:
        limits = self._service.limits
        if len(body) > LARGE:  # ids alone hardly ever are
            return None
        try:
            parsed_body = peek(scope, body, form, limits)
        except Problem:
            return None
        return (
            lookup_arrow.batch(parsed_body)
            if form == "arrow"
            else fast_parse.batch(parsed_body, limits.max_batch)
        )

    async def _from_ladder(
        self,
        scope: Scope,
        body: bytes,
        table: str,
        deadline_s: float,
        served: ServedGenerations,
        started: float,
    ) -> bytes | None:
        service, limits = self._service, self._service.limits
        try:
            request = await run_in_thread_if_large(
                body, lambda: lookup_of(scope, body, "json", table, limits)
            )
            # No namespace but the own one is known here.
            if request.options.arm is not None or request.options.generation is not None:
                return None
            service.metrics.stage("parse", service.timer() - started)
            spend(scope, len(request.entities))
            request = LookupRequest(
                request.entities, fast_parse.tighter(request.options, deadline_s)
            )
            lookup = service.lookup(is_reshaped=request.options.is_reshaped)
            answers = await lookup(served, request, started)
        except (Problem, InvalidInput) as error:
            refuse(scope, error)
            return None
        return orjson.dumps({"answers": service.attach_staleness(answers)}, option=JSON)


def refuses(table: Table, k: int | None) -> bool:
    """Returns whether `k` exceeds the width of a top-k table, which the routes behind report."""
    return table.kind == "topk" and k is not None and k > table.layout.width
