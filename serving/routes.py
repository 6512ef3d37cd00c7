"""The HTTP surface: reads a request, asks the ladder, sends prebuilt JSON."""

import functools
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from cache.errors import InvalidInput, LarderError
from cache.tiered import Tiered
from serving import openapi, schema
from serving.admission import Admission
from serving.answer import Answer
from serving.arrow_answers import answers_stream
from serving.arrow_request import lookup_arrow
from serving.ask import Ask, Limits, Options
from serving.follower import Follower
from serving.holding import Holding
from serving.http import as_arrow, as_json, read_body, refused
from serving.ladder import Ladder
from serving.media import forms
from serving.metrics import CONTENT_TYPE, Metrics
from serving.nights import Nights
from serving.options import with_headers
from serving.overview import overview
from serving.parse import feedback_body, lookup_body, lookup_url, score_body
from serving.plan import credentials
from serving.problem import Problem, from_input
from serving.quality.quality import Quality
from serving.score import rank_candidates, vector_table
from serving.snapshot import Snapshot
from serving.trial import Trial

log = logging.getLogger(__name__)

Handler = Callable[[Request, float], Awaitable[object]]
Endpoint = Callable[[Request], Awaitable[Response]]

LOOKUP_PREFIX = b"/v1/lookup/"


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes need of the running program."""

    follower: Follower
    ladder: Ladder
    metrics: Metrics
    limits: Limits
    body_bytes: int
    token: str
    drain: Callable[[], Awaitable[None]]
    nights: Nights
    trial: Trial
    tiers: Tiered
    l2_bound_s: Callable[[], float]
    expose: Callable[[], Awaitable[bytes]]
    admission: Admission
    body_timeout_s: float
    quality: Quality
    timer: Callable[[], float] = time.monotonic

    def holding(self) -> Holding:
        """What this request will be answered from, captured once; 503 before anything is loaded."""
        held = self.follower.holding
        if held is None:
            why = self.follower.failed or "no generation has been published yet"
            raise Problem(503, "not_ready", why)
        return held


class _Direct(APIRoute):
    """A documented route that hands over the request as it is: resolving dependencies would cost a third of a hit."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def routes(service: Service) -> APIRouter:
    """All routes of the service."""
    router = APIRouter(route_class=_Direct)

    async def lookup_one(request: Request, started: float) -> object:
        raw_path = request.scope.get("raw_path") or request.url.path.encode()
        ask = lookup_url(raw_path, LOOKUP_PREFIX, request.scope["query_string"], service.limits)
        return (await _answers(service, request, ask, started))[0][0]

    async def lookup_table(request: Request, started: float) -> object:
        form = forms(request.scope["headers"])
        body = await _body(service, request)
        read = lookup_arrow if form.sent == "arrow" else lookup_body
        ask = read(body, request.path_params["table"], service.limits)
        answers, of = await _answers(service, request, ask, started)
        if form.wanted == "json":
            return {"answers": answers}
        table = of.table(request.path_params["table"])
        ids = [entity.raw for entity in ask.entities]
        return as_arrow(answers_stream(table, ids, dict(enumerate(answers))))

    async def lookup_tables(request: Request, started: float) -> object:
        ask = lookup_body(await _body(service, request), None, service.limits)
        return {"answers": (await _answers(service, request, ask, started))[0]}

    async def score(request: Request, started: float) -> object:
        ask = score_body(await _body(service, request), service.limits)
        ask = ask.with_options(_with_headers(service, request, ask.options))
        live = service.holding()
        user = ask.user.of_table(vector_table(live.live).name)
        holding, part = service.trial.route(live, (user,), ask.options)
        answer = await rank_candidates(service.ladder, holding, ask, started)
        service.trial.count(
            part, [{"source": answer["source"]}]
        )  # its scores are of the caller's items
        return marked(service, [answer])[0]

    async def feedback(request: Request, _started: float) -> object:
        told = feedback_body(await _body(service, request))
        return {"arm": service.trial.feedback(service.holding(), *told)}

    async def generations(_request: Request, _started: float) -> object:
        shelf = service.follower.shelf
        return overview(service.holding(), service.follower.health, shelf.canary)

    async def healthz(_request: Request) -> Response:
        return as_json(200, {"status": "ok"})

    async def readyz(_request: Request) -> Response:
        health, held = service.follower.health, service.follower.holding
        body = {
            "ready": health.ready,
            "generation": None if held is None else held.live.generation,
            "epoch": None if held is None else held.live.epoch,
            "stale": health.stale,
            "degraded": health.degraded,
            "failed": health.failed,
            "schedule": service.nights.body(),
        }
        return as_json(200 if health.ready else 503, body)

    async def metrics(_request: Request) -> Response:
        return Response(await service.expose(), media_type=CONTENT_TYPE)

    def add(path: str, method: str, handler: Handler, extra: dict[str, Any] | None = None) -> None:
        route = path.partition("{entity")[0].rstrip("/") if "{entity" in path else path
        router.add_api_route(
            path,
            _guarded(service, f"{method} {route}", handler),
            methods=[method],
            name=handler.__name__,
            openapi_extra=extra,
        )

    described = functools.partial(openapi.described, has_token=bool(service.token))
    add(
        "/v1/lookup/{table}/{entity:path}", "GET", lookup_one,
        described(schema.ANSWER, path=("table", "entity"), query=True),
    )  # fmt: skip
    add(
        "/v1/lookup/{table}", "POST", lookup_table,
        described(
            schema.ANSWERS, body=schema.lookup(service.limits), path=("table",), has_arrow=True
        ),
    )  # fmt: skip
    add(
        "/v1/lookup",
        "POST",
        lookup_tables,
        described(schema.ANSWERS, body=schema.lookup_many(service.limits)),
    )
    add("/v1/score", "POST", score, described(schema.SCORES, body=schema.score(service.limits)))
    add(
        "/v1/feedback", "POST", feedback,
        described(schema.FEEDBACK, body=schema.FEEDBACK_BODY, has_options=False),
    )  # fmt: skip
    add("/v1/generations", "GET", generations, described(schema.GENERATIONS, has_options=False))
    router.add_api_route("/healthz", healthz, methods=["GET"])
    router.add_api_route("/readyz", readyz, methods=["GET"], openapi_extra=openapi.READYZ)
    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)
    return router


async def _answers(
    service: Service, request: Request, ask: Ask, started: float
) -> tuple[list[Answer], Snapshot]:
    """One per entity, and the snapshot that was asked."""
    ask = Ask(ask.entities, _with_headers(service, request, ask.options))
    service.metrics.stage("parse", service.timer() - started)
    holding, part = service.trial.route(service.holding(), ask.entities, ask.options)
    answers = await service.ladder.lookup(holding, ask, started)
    service.trial.count(part, answers)
    return marked(service, answers), holding.pinned(ask.options.generation).live


async def _body(service: Service, request: Request) -> bytes:
    return await read_body(request, service.body_bytes, service.body_timeout_s)


def _with_headers(service: Service, request: Request, options: Options) -> Options:
    return with_headers(options, request.scope["headers"], service.limits)


def marked(service: Service, answers: list[Answer]) -> list[Answer]:
    """The answers, each with why this replica may lag behind, if it may."""
    if (stale := service.follower.stale) is not None:
        for answer in answers:
            answer["stale"] = stale
    return answers


def _guarded(service: Service, route: str, handler: Handler) -> Endpoint:
    expected = credentials(service.token)

    async def answer(request: Request) -> Response:
        started = service.timer()
        try:
            if service.token:
                # Starlette reads headers as latin-1: encoded back, these are the bytes that were sent.
                sent = request.headers.get("authorization", "").encode("latin-1")
                if not any(hmac.compare_digest(sent, each) for each in expected):
                    raise Problem(401, "unauthorized", "send Authorization: Bearer <token>")
            found = await handler(request, started)
            response = found if isinstance(found, Response) else as_json(200, found)
        except Problem as problem:
            response = refused(problem)
        except ClientDisconnect:
            response = refused(Problem(400, "disconnected", "the body ended early"))
        except InvalidInput as error:
            response = refused(from_input(error, "body"))
        except LarderError as error:
            log.exception("%s failed", route)
            response = refused(Problem(503, error.code, error.message))
        except Exception:
            log.exception("%s failed", route)
            response = refused(Problem(500, "internal_error", "this is a defect; the log has more"))
        service.metrics.requested(route, response.status_code)
        return response

    return answer
