"""Guard around every documented route: the scope it needs, errors as problems, and the count of requests."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from cache.errors import InvalidInput, LarderError, TierUnavailable
from serving.access.callers import caller_of
from serving.access.scopes import Scope
from serving.admission.work_pacer import waited_in
from serving.metrics.registry import Metrics
from serving.requests.bodies import as_json, refused
from serving.requests.errors import Problem, from_input

log = logging.getLogger(__name__)

Handler = Callable[[Request, float], Awaitable[object]]
"""Handler of a route: takes the request and when it began; a response, or what is to be sent as JSON."""
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Guard:
    """Guard of one service's routes."""

    metrics: Metrics
    timer: Callable[[], float]

    def around(
        self, route: str, handler: Handler, *, needs: Scope, is_counted: bool = True
    ) -> Endpoint:
        """The handler as an endpoint for callers with one scope; `route` is what its requests are counted under."""

        async def answer(request: Request) -> Response:
            started = self.timer() - waited_in(request.scope)
            try:
                caller_of(request.scope).demand(needs)
                handler_result = await handler(request, started)
                response = (
                    handler_result
                    if isinstance(handler_result, Response)
                    else as_json(200, handler_result)
                )
            except Problem as problem:
                response = refused(problem)
            except ClientDisconnect:
                response = refused(Problem(400, "disconnected", "the body ended early"))
            except InvalidInput as error:
                response = refused(from_input(error, "body"))
            except TierUnavailable as error:
                log.warning(
                    "%s failed: %s", route, error.message
                )  # names the host, which is for the log alone
                response = refused(Problem(503, error.code, "Redis does not answer"))
            except LarderError as error:
                log.exception("%s failed", route)
                response = refused(Problem(503, error.code, error.message))
            except Exception:
                log.exception("%s failed", route)
                problem_message = "this is a defect; the log has more"
                response = refused(Problem(500, "internal_error", problem_message))
            if is_counted:
                self.metrics.requested(route, response.status_code)
            return response

        return answer
