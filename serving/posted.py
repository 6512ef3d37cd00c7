"""The body of a lookup of one table, read and answered ahead of the router: a batch of ids, or the ladder's answers."""

from collections.abc import Callable

import orjson

from cache.errors import InvalidInput
from cache.manifest import Table
from serving import arrow_request, plan
from serving.ask import Ask, Options
from serving.batch import Batches
from serving.content import LARGE, Scope, beside, lookup_of, peek, refuse
from serving.holding import Holding
from serving.media import Form, Forms
from serving.problem import Problem
from serving.render import JSON
from serving.resolved import Lookup
from serving.routes import Service, marked

_JSON_BOTH = Forms("json", "json")


class Posted:
    """Answers as the routes do; None for what is refused, which is theirs to say."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self.batches = Batches(service, clock)
        self._service = service

    async def answer(
        self,
        scope: Scope,
        body: bytes,
        form: Forms,
        table: Table,
        deadline_s: float,
        holding: Holding,
        started: float,
    ) -> bytes | None:
        """The body of the response, in the form that is wanted; `deadline_s` is what the headers allow."""
        batch = self._batch(scope, body, form.sent)
        if batch is None:
            if form != _JSON_BOTH:
                return None
            return await self._from_ladder(scope, body, table.name, deadline_s, holding, started)
        if refuses(table, batch.k):
            return None
        options = Options(self._service.limits.deadline_ms / 1000, batch.k)
        options = plan.tighter(options, deadline_s)
        lookup = Lookup(holding, table, batch.raws, options, started)
        answered = self.batches.stream if form.wanted == "arrow" else self.batches.answer
        return await answered(lookup)

    def _batch(self, scope: Scope, body: bytes, form: Form) -> plan.Batch | None:
        limits = self._service.limits
        if len(body) > LARGE:  # ids alone hardly ever are
            return None
        try:
            found = peek(scope, body, form, limits)
        except Problem:
            return None
        return (
            arrow_request.batch(found) if form == "arrow" else plan.batch(found, limits.max_batch)
        )

    async def _from_ladder(
        self,
        scope: Scope,
        body: bytes,
        table: str,
        deadline_s: float,
        holding: Holding,
        started: float,
    ) -> bytes | None:
        service, limits = self._service, self._service.limits
        try:
            ask = await beside(body, lambda: lookup_of(scope, body, "json", table, limits))
            service.metrics.stage("parse", service.timer() - started)
            ask = Ask(ask.entities, plan.tighter(ask.options, deadline_s))
            answers = await service.ladder.lookup(holding, ask, started)
        except (Problem, InvalidInput) as error:
            refuse(scope, error)
            return None
        return orjson.dumps({"answers": marked(service, answers)}, option=JSON)


def refuses(table: Table, k: int | None) -> bool:
    """Whether the request is one that is told so elsewhere."""
    return table.kind == "topk" and k is not None and k > table.layout.width
