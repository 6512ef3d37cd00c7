"""Tokens on the way past uvicorn: judged once per head, in force each time, and metered by the request."""

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from serving.access.callers import CallerCounts, Callers
from serving.access.quota import QuotaTable
from serving.access.token_file import TokenEntry
from serving.http.lookup_connection import HeaderCache, LookupConnection
from serving.requests.errors import Problem
from tests.fakes import FakeClock
from tests.unit.serving.http.test_connection import READY, Connection, Front, get, messages

TARGET = b"/v1/lookup/t/ready"
HEAD = b"\r\nHost: a\r\nAuthorization: Bearer right\r\n\r\n"


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that is ready, in these tests alone."""
    monkeypatch.setitem(READY, TARGET, b'{"ready":1}')


class Metered(Front):
    """An application that counts what reaches it, and refuses as the real one does."""

    def __init__(self, clock: FakeClock, **entry: Any) -> None:
        super().__init__()
        digest = hashlib.sha256(b"right").hexdigest()
        self.tokens = {"ana": TokenEntry(**{"sha256": digest, "scopes": ("read",), **entry})}
        self.clock, self.counts, self.reached = clock, dict[str, CallerCounts](), list[bytes]()
        self.rows = QuotaTable.create_private()
        self.callers = self.make_callers()

    def make_callers(self) -> Callers:
        """Callers of the tokens as they are now."""
        return Callers.of("", self.tokens, self.rows, self.counts, clock=self.clock, monotonic_clock=self.clock)

    def refuse_for_problem(self, problem: Problem) -> Any:
        """As the application answers."""
        return messages(problem.status, [(b"retry-after", b"1")], b"refused")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["raw_path"])
        await super().__call__(scope, receive, send)


def statuses(front: Front, chunks: list[bytes]) -> list[int]:
    """What each of these requests is answered with."""

    async def run() -> list[int]:
        connection, status_codes = Connection(front), []
        assert isinstance(connection.protocol, LookupConnection)
        for chunk in chunks:
            length_before = len(connection.transport.written)
            await connection.deliver(chunk)
            status_codes.append(int(connection.transport.written[length_before:][9:12]))
        connection.protocol.connection_lost(None)
        return status_codes

    return asyncio.run(run())


def test_a_token_without_bounds_is_answered_past_uvicorn_and_counted() -> None:
    front = Metered(FakeClock())

    assert statuses(front, [get(TARGET, HEAD)] * 5) == [200] * 5

    assert len(front.reached) == 1 and front.untraced_fast.answered == [TARGET] * 4  # the first head is uvicorn's
    assert front.counts["ana"].request_count == 4


def test_ready_answers_are_metered_one_by_one() -> None:
    clock = FakeClock()
    front = Metered(clock, requests_per_s=2.0, entities_per_s=100.0, in_flight=1)
    first = [get(TARGET, HEAD)] * 2  # until it came twice a head is uvicorn's, and counted there

    status_codes = statuses(front, [*first, *[get(TARGET, HEAD)] * 3])

    assert status_codes == [200, 200, 200, 429, 429] and front.untraced_fast.answered == [TARGET] * 2
    assert front.counts["ana"].refusals_by_reason["requests_per_s"] == 2
    clock.tick(1.0)
    assert statuses(front, [get(TARGET, HEAD)] * 5) == [200, 200, 200, 429, 429]
    (quota,) = [caller.quota for _, caller in front.callers._digest_caller_pairs]
    assert quota is not None and front.rows.read_state(quota._row_key, clock.now_s).requests_in_flight == 0


def test_what_is_not_ready_goes_to_the_application_uncounted() -> None:
    front = Metered(FakeClock(), requests_per_s=1.0)
    stored_target = b"/v1/lookup/t/a"

    assert statuses(front, [get(stored_target, HEAD)] * 10) == [200] * 10

    assert front.reached == [stored_target] * 10 and front.looked_up_targets == []
    assert statuses(front, [get(TARGET, HEAD)] * 3) == [200, 200, 429]  # all of it was given back


def test_an_expired_token_is_the_applications_to_refuse() -> None:
    clock = FakeClock(1_000.0)
    front = Metered(clock, expires_at="1970-01-01T00:20:00+00:00")
    assert statuses(front, [get(TARGET, HEAD)] * 3) == [200] * 3
    assert len(front.reached) == 1

    clock.now_s = 1_200.0
    statuses(front, [get(TARGET, HEAD)] * 3)

    assert len(front.reached) == 4 and len(front.untraced_fast.answered) == 2


def test_a_head_that_was_judged_is_judged_anew_once_tokens_change() -> None:
    front = Metered(FakeClock())
    fast: Any = SimpleNamespace(can_use_fast_path=lambda _headers: True)
    blocks = HeaderCache(front)  # type: ignore[arg-type]
    allowed = blocks.judge_and_cache(fast, HEAD)
    assert allowed is not None and allowed.caller.name == "ana"
    assert blocks.find_judged(fast, HEAD) is allowed

    front.tokens = {}
    front.callers = front.make_callers()

    assert blocks.find_judged(fast, HEAD) is None and blocks.judge_and_cache(fast, HEAD) is None


def test_a_scope_that_is_missing_is_the_applications_to_tell() -> None:
    front = Metered(FakeClock(), scopes=("score",))

    statuses(front, [get(TARGET, HEAD)] * 4)

    assert len(front.reached) == 4 and front.untraced_fast.answered == []
