"""Routes of the service: each parses a request, calls the service, and sends an answer or a problem."""

import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect

from cache.errors import InvalidInput, LarderError, TierUnavailable
from cache.store.releases import Canary
from serving.access.callers import caller_of, spend_quota
from serving.access.token_file import Scope
from serving.admission.work_pacer import noted_wait_s
from serving.engine.candidate_scoring import rank_candidates
from serving.engine.rendering.answer_fields import AnswerJson
from serving.engine.rendering.arrow_answers import answers_stream
from serving.engine.service import LookupService, RoutedRequest
from serving.generations.nights import Nights
from serving.generations.pointer_follower import Health
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot, user_vector_table
from serving.http.openapi import Operation, openapi_document
from serving.http.static_files import StaticPage
from serving.metrics.registry import CONTENT_TYPE, Metrics
from serving.replica.hooks import Handler, Hooks
from serving.requests.bodies import arrow_response, json_response, read_body, refusal_response
from serving.requests.errors import Problem, problem_from_input, unprocessable
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.named_schema import Json
from serving.requests.negotiation import BodyForm, check_json_type, parse_forms
from serving.requests.options import RequestOptions, with_headers
from serving.requests.parsing import (
    LOOKUP_PATH_PREFIX,
    lookup_from_body,
    lookup_from_url,
    pop_content,
    run_in_thread_if_large,
    score_from_json,
)

log = logging.getLogger(__name__)

DOCS_PAGE = StaticPage("/docs", "serving.http", "docs_page")
"""Documentation page, drawn from /openapi.json; FastAPI's own page loads a script from another host."""

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(LookupService):
    """Lookup service with the other functions that the routes need."""

    has_tokens: bool
    drain: Callable[[], Awaitable[None]]
    nights: Nights
    expose_metrics: Callable[[], Awaitable[bytes]]
    operations: Sequence[Operation]
    """Operations that this service offers."""
    hooks: Hooks


def build_routes(service: Service) -> tuple[APIRouter, Json]:
    """Return all routes of the service, and their OpenAPI document."""
    register_url_convertor("rest", _PathRemainder())
    router = APIRouter(route_class=_DirectRoute)
    guard = Guard(service.metrics, service.monotonic_clock)

    async def lookup_one(request: Request, request_started_at: float) -> object:
        raw_path = request.scope.get("raw_path") or request.url.path.encode()
        lookup_request = lookup_from_url(raw_path, LOOKUP_PATH_PREFIX, request.scope["query_string"], service.limits)
        return (await _look_up(service, request, lookup_request, request_started_at))[0][0]

    async def lookup_table(request: Request, request_started_at: float) -> object:
        forms = parse_forms(request.scope["headers"])
        lookup_request = await read_lookup(service, request, forms.request_form, request.path_params["table"])
        answers, snapshot = await _look_up(service, request, lookup_request, request_started_at)
        if forms.response_form == "json":
            return {"answers": answers}
        table = snapshot.table(request.path_params["table"])
        entity_ids = [entity.raw_id for entity in lookup_request.entities]
        return arrow_response(answers_stream(table, entity_ids, dict(enumerate(answers))))

    async def lookup_tables(request: Request, request_started_at: float) -> object:
        lookup_request = await read_lookup(service, request, "json", None)
        return {"answers": (await _look_up(service, request, lookup_request, request_started_at))[0]}

    async def score(request: Request, request_started_at: float) -> object:
        score_request = score_from_json(await read_json(service, request), service.limits)
        spend_quota(request.scope, 1)
        score_request = score_request.with_options(with_request_headers(service, request, score_request.options))
        user = score_request.user.with_table(user_vector_table(service.capture_served().live).name)
        routed_request = _route_request(service, (user,), score_request.options)
        served, ladder = routed_request.capture_served(), routed_request.service.ladder
        answer = await rank_candidates(ladder, served, score_request, request_started_at)
        return routed_request.finish([answer], is_of_candidates=True)[0]

    async def generations(_request: Request, _request_started_at: float) -> object:
        holder = service.follower.holder
        return generations_overview(service.capture_served(), service.follower.health, holder.canary)

    async def healthz(_request: Request) -> Response:
        return json_response(200, {"status": "ok"})

    async def readyz(_request: Request) -> Response:
        health, served = service.follower.health, service.follower.served
        body = {
            **health.to_public_json(),
            "generation": None if served is None else served.live.generation,
            "epoch": None if served is None else served.live.epoch,
            "schedule": service.nights.readyz_body(),
        }
        return json_response(200 if health.is_ready else 503, body)

    async def metrics(_request: Request) -> Response:
        return Response(await service.expose_metrics(), media_type=CONTENT_TYPE)

    handlers: dict[str, Handler] = {
        "lookup": lookup_one,
        "lookupBatch": lookup_table,
        "lookupTables": lookup_tables,
        "score": score,
        "getGenerations": generations,
        **service.hooks.handlers,
    }
    for operation in service.operations:
        handler = handlers[operation.operation_id]
        path, method = operation.path, operation.method.upper()
        assert operation.scope is not None  # noqa: S101  what anybody may ask is no handler of these
        endpoint = guard.wrap_handler(
            f"{method} {path.partition('{entity')[0].rstrip('/') if '{entity' in path else path}",
            handler, required_scope=operation.scope, is_counted=operation.is_counted,
        )  # fmt: skip
        router.add_api_route(
            path.replace("{entity}", "{entity:rest}"), endpoint, methods=[method], name=handler.__name__
        )
    router.add_api_route("/healthz", healthz, methods=["GET"])
    router.add_api_route("/readyz", readyz, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)
    router.routes.extend(service.hooks.page_routes)
    router.routes.extend(DOCS_PAGE.routes())
    return router, openapi_document(service.operations, has_tokens=service.has_tokens)


async def _look_up(
    service: Service, request: Request, lookup_request: LookupRequest, request_started_at: float
) -> tuple[list[AnswerJson], Snapshot]:
    """Return the answers, one per entity, and the snapshot that answered."""
    lookup_request = LookupRequest(
        lookup_request.entities, with_request_headers(service, request, lookup_request.options)
    )
    service.metrics.stage("parse", service.monotonic_clock() - request_started_at)
    routed_request = _route_request(service, lookup_request.entities, lookup_request.options)
    served = routed_request.capture_served()
    lookup_function = routed_request.service.lookup(is_reshaped=lookup_request.options.is_reshaped)
    answers = await lookup_function(served, lookup_request, request_started_at)
    live = served.pin_generation(lookup_request.options.generation).live
    return routed_request.finish(answers), live


def _route_request(service: Service, entities: Sequence[RequestedEntity], options: RequestOptions) -> RoutedRequest:
    """Return the route of a request after all routers, in order; raise Problem if none can answer it."""
    routed_request = RoutedRequest(service)
    for router in service.hooks.routers:
        routed_request = router(routed_request, entities, options)
    return routed_request


async def read_lookup(
    service: LookupService, request: Request, body_form: BodyForm, table_name: str | None
) -> LookupRequest:
    """Read the body of a lookup, and charge its entities to the caller's quota; raise Problem."""
    request_body, limits = await read_request_body(service, request, body_form), service.limits
    lookup_request = await run_in_thread_if_large(
        request_body, functools.partial(lookup_from_body, request.scope, request_body, body_form, table_name, limits)
    )
    spend_quota(request.scope, len(lookup_request.entities))
    return lookup_request


async def read_json(service: LookupService, request: Request) -> object:
    """Read a body of JSON; raise Problem."""
    body, limits = await read_request_body(service, request), service.limits
    return await run_in_thread_if_large(body, functools.partial(pop_content, request.scope, body, "json", limits))


async def read_request_body(service: LookupService, request: Request, body_form: BodyForm = "json") -> bytes:
    """Read a body of this form within the service's bounds; raise Problem, also for options in the URL."""
    if query := request.scope["query_string"]:
        option_name = query.partition(b"&")[0].partition(b"=")[0].decode("ascii", "replace")
        raise unprocessable(
            "unknown_field", f"{option_name[:40]!r} is in the URL: a POST has its options in the body", "query"
        )
    if body_form == "json":
        check_json_type(request.scope["headers"])
    return await read_body(request, service.body_bytes_max, service.body_timeout_s)


def with_request_headers(service: LookupService, request: Request, options: RequestOptions) -> RequestOptions:
    """Return the options, with those in the request's headers."""
    return with_headers(options, request.scope["headers"], service.limits)


class _PathRemainder(PathConvertor):
    """Path convertor for any remaining path; Starlette's stops at a line break, which an id may contain."""

    regex = r"[\s\S]*"


class _DirectRoute(APIRoute):
    """Documented route that gets the plain request: FastAPI's dependencies would cost a third of a hit."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint itself."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


@dataclass(frozen=True, slots=True)
class Guard:
    """Guard of one service's routes."""

    metrics: Metrics
    monotonic_clock: Callable[[], float]

    def wrap_handler(self, route: str, handler: Handler, *, required_scope: Scope, is_counted: bool = True) -> Endpoint:
        """Wrap the handler as an endpoint for callers with `required_scope`; requests are counted under `route`."""

        async def answer(request: Request) -> Response:
            request_started_at = self.monotonic_clock() - noted_wait_s(request.scope)
            try:
                caller_of(request.scope).require_scope(required_scope)
                handler_result = await handler(request, request_started_at)
                response = (
                    handler_result if isinstance(handler_result, Response) else json_response(200, handler_result)
                )
            except Problem as problem:
                response = refusal_response(problem)
            except ClientDisconnect:
                response = refusal_response(Problem(400, "disconnected", "the body ended early"))
            except InvalidInput as error:
                response = refusal_response(problem_from_input(error, "body"))
            except TierUnavailable as error:
                log.warning("%s failed: %s", route, error.message)  # it names the host, which only the log may show
                response = refusal_response(Problem(503, error.code, "Redis does not answer"))
            except LarderError as error:
                log.exception("%s failed", route)
                response = refusal_response(Problem(503, error.code, error.message))
            except Exception:
                log.exception("%s failed", route)
                problem_message = "this is a bug; the log has the details"
                response = refusal_response(Problem(500, "internal_error", problem_message))
            if is_counted:
                self.metrics.requested(route, response.status_code)
            return response

        return answer


def generations_overview(served: ServedGenerations, health: Health, canary: Canary | None) -> dict[str, Any]:
    """Return the body of GET /v1/generations; `next` is the staged generation or the canary."""
    previous_snapshot, next_snapshot = served.previous, served.next
    return {
        "live": _snapshot_overview(served.live),
        "previous": None if previous_snapshot is None else _snapshot_overview(previous_snapshot),
        "next": None if next_snapshot is None else _snapshot_overview(next_snapshot),
        "canary": canary and {"generation": canary.generation, "percent": canary.percent, "since": canary.since},
        "blocklist": {
            "version": served.live.blocklist.version,
            "items": len(served.live.blocklist.items),
            "entities": len(served.live.blocklist.entities) + len(served.live.blocklist.users),
        },
        "ready": health.is_ready,
        "stale": health.stale_reason,
        "degraded": health.degraded_reason,
        "failed": health.failure_reason,
    }


def _snapshot_overview(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    precision_by_model = {} if snapshot.predictor is None else snapshot.predictor.precisions
    provider_by_model = {} if snapshot.predictor is None else snapshot.predictor.provider_by_model
    return {
        "generation": snapshot.generation,
        "epoch": snapshot.epoch,
        "published_at": snapshot.published_at,
        "data_until": manifest.data_until,
        "entities": {name: entity_set.count for name, entity_set in manifest.entity_sets.items()},
        "tables": {
            name: {
                "kind": table.kind,
                "entity": table.entity,
                "width": table.layout.width,
                "producer": table.producer.kind,
                "labels": table.labels,
            }
            for name, table in manifest.tables.items()
        },
        "models": {
            name: {
                "digest": model.digest,
                # The precision in use; it is fp32 if the night could not quantize.
                "precision": precision_by_model.get(name),
                "provider": provider_by_model.get(name),
                "fp32_bytes": sum(model_file.size_bytes for model_file in model.fp32_files),
                "int8_bytes": None if model.int8 is None else model.int8.size_bytes,
                "agreement": dict(model.agreement),
            }
            for name, model in manifest.models.items()
        },
        "fallback": snapshot.fallback_reason,
        "indexes": {
            name: {"kind": index.kind, "recall": index.recall, "size_bytes": index.file.size_bytes}
            for name, index in manifest.indexes.items()
        },
    }
