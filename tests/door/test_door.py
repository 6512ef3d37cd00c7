"""A corpus of request streams, and random ones, at both transports and behind nginx, judged by two other readers.

`rule` says what is compared. With LARDER_FUZZ_MINUTES the random streams go on for so many minutes.
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.blackbox import Shop, free_port, listens, nginx, open_shop, started
from tests.door.corpus import Case, get, read_corpus
from tests.door.judges import NODE, H11Judge, Judge, Reading
from tests.door.mutations import mutated
from tests.door.rule import REFUSALS, is_refusal, violations
from tests.door.wire import Answer, Exchange, all_bytes, exchange
from tests.polling import poll_until

CASES = read_corpus()
NGINX = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))
SEED = int(os.environ.get("LARDER_SEED", "0"))
MINUTES = float(os.environ.get("LARDER_FUZZ_MINUTES", "5"))
SHORT_BYTES = 2_000
"""Streams that are longer are not cut at every byte."""


def last(user: str) -> bytes:
    """A GET of one id, behind which the connection ends."""
    return get(user).replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n")


LAST = last("z9")

pytestmark = pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")


@dataclass(frozen=True)
class Door:
    """A running service, and whether its transport has bounds on peers."""

    address: tuple[str, int]
    has_bounds: bool


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return open_shop(tmp_path_factory.mktemp("shop"), redis_url)


@pytest.fixture(scope="module", params=["fast", "uvicorn"])
def service(shop: Shop, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Door]:
    """A running service, over the fast transport and over uvicorn's."""
    log = tmp_path_factory.mktemp("service") / "log"
    is_fast = request.param == "fast"
    with started(shop, log, LARDER_FAST_HTTP="on" if is_fast else "off") as running:
        yield Door((running.host, running.port), is_fast)
    assert "Traceback" not in log.read_text()


def broken(
    service: Door,
    judges: Sequence[Judge],
    stream: bytes,
    pieces: Sequence[bytes] | None = None,
    apart: Sequence[bytes] = (),
) -> list[str]:
    """Return how the answers to a stream break the rule."""
    readings = {judge.name: judge.read(stream) for judge in judges}
    answered = send_stream(service, readings, [stream] if pieces is None else pieces, apart)
    return violations(readings, answered, stream, preceding_count=len(apart))


def send_stream(
    service: Door, readings: dict[str, Reading], pieces: Sequence[bytes], apart: Sequence[bytes] = ()
) -> Exchange:
    """Return a service's answers to a stream that the judges have read."""
    longest = max(readings.values(), key=lambda reading: len(reading.messages))
    methods = [message.method for message in longest.messages]
    methods = methods[:1] * len(apart) + methods
    answered = Exchange([], b"")

    def is_answered() -> bool:
        nonlocal answered
        answered = exchange(service.address, pieces, methods, apart=apart)
        return bool(answered.answers or answered.leftover)

    # For a second after a backlog the service closes, without an answer, connections whose peers have closed their
    # side.
    poll_until(is_answered, 6, every_s=1.5)
    return answered


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_stream_of_the_corpus_ends_where_the_judges_say(service: Door, judges: list[Judge], case: Case) -> None:
    readings = {judge.name: judge.read(case.stream) for judge in judges}

    answered = send_stream(service, readings, [case.stream])

    assert violations(readings, answered, case.stream) == []
    if case.is_bounded and not service.has_bounds:
        return
    taken_answers = [answer for answer in answered.answers if not is_refusal(answer)]
    assert len(taken_answers) == case.accepted_count, answered
    assert len(answered.answers) - len(taken_answers) == case.is_refused, answered


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_stream_of_the_corpus_may_stand_before_another_request(
    service: Door, judges: list[Judge], case: Case
) -> None:
    assert broken(service, judges, case.stream + LAST) == []


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_stream_of_the_corpus_may_come_on_a_connection_that_is_known(
    service: Door, judges: list[Judge], case: Case
) -> None:
    # Given a connection whose first request was answered three times, so that the service has cached its head
    reading = H11Judge().read(case.stream)
    if not case.accepted_count or reading.first_bytes is None or is_ending(reading):
        first = get("a1")
    else:
        first = case.stream[: reading.first_bytes].removeprefix(b"\r\n")

    assert broken(service, judges, case.stream, apart=[first] * 3) == []


def is_ending(reading: Reading) -> bool:
    """Return True if no request may follow the first one."""
    return len(reading.messages) == 1 and reading.end == "closed"


def cuts_of(case: Case, rng: random.Random, count: int | None) -> list[list[bytes]]:
    """The stream byte by byte, and cut in two at `count` random bytes, at every byte if that is None."""
    stream = case.stream
    if len(stream) > SHORT_BYTES:
        return []
    positions = list(range(1, len(stream)))
    if count is not None:
        positions = rng.sample(positions, min(count, len(positions)))
    drips = [[bytes([byte]) for byte in stream]] if count is None or len(stream) < 300 else []
    return drips + [[stream[:at], stream[at:]] for at in positions]


def hold_in_pieces(service: Door, judges: list[Judge], cases: Sequence[Case], count: int | None) -> None:
    """Fail unless each stream gets the same answers in pieces as in one."""
    rng = random.Random(SEED)
    for case in cases:
        readings = {judge.name: judge.read(case.stream) for judge in judges}
        for pieces in cuts_of(case, rng, count):
            answered = send_stream(service, readings, pieces)
            sizes = [len(piece) for piece in pieces[:4]]
            assert violations(readings, answered, case.stream) == [], (case.name, sizes)
            taken_answers = [answer for answer in answered.answers if not is_refusal(answer)]
            assert len(taken_answers) == case.accepted_count, (case.name, sizes)


def test_streams_mean_the_same_in_pieces(service: Door, judges: list[Judge]) -> None:
    hold_in_pieces(service, judges, random.Random(SEED).sample(CASES, 40), 2)


@pytest.mark.storm
def test_streams_mean_the_same_cut_at_every_byte(service: Door, judges: list[Judge]) -> None:
    hold_in_pieces(service, judges, CASES, None)


def smallest(stream: bytes, is_broken: Callable[[bytes], bool]) -> bytes:
    """Return a stream that still breaks the rule and of which no part can be left out; bounded in tries."""
    size, tries = max(1, len(stream) // 2), 0
    while size and tries < 400:
        at = 0
        while at < len(stream) and tries < 400:
            tries += 1
            shorter = stream[:at] + stream[at + size :]
            if shorter and is_broken(shorter):
                stream = shorter
            else:
                at += size
        size //= 2
    return stream


def hold_for_random_streams(service: Door, judges: list[Judge], until_s: float, count_max: int) -> int:
    """Fail for a random stream that breaks the rule; return how many were tried in the given time."""
    rng = random.Random(SEED)
    streams, tried = [case.stream for case in CASES], 0
    while time.monotonic() < until_s and (not count_max or tried < count_max):
        stream = mutated(rng, streams)
        tried += 1
        if not stream:
            continue
        pieces = [stream]
        if rng.random() < 0.3 and len(stream) > 1:
            at = rng.randrange(1, len(stream))
            pieces = [stream[:at], stream[at:]]
        if faults := broken(service, judges, stream, pieces):
            if len(pieces) == 1:
                stream = smallest(stream, lambda shorter: bool(broken(service, judges, shorter)))
                faults = broken(service, judges, stream) or faults
            readings = {judge.name: judge.read(stream) for judge in judges}
            raise AssertionError(f"seed {SEED}, stream {tried}: {stream!r}\n{faults}\n{readings}")
    return tried


def test_random_streams_end_where_the_judges_say(service: Door, judges: list[Judge]) -> None:
    tried = hold_for_random_streams(service, judges, time.monotonic() + 30, 300)

    assert tried > 50


@pytest.mark.storm
def test_many_random_streams_end_where_the_judges_say(service: Door, judges: list[Judge]) -> None:
    tried = hold_for_random_streams(service, judges, time.monotonic() + 20 * MINUTES, 0)

    print(f"{tried} random streams")
    assert tried > 50


@contextmanager
def behind_nginx(service: Door, folder: Path) -> Iterator[list[tuple[str, int]]]:
    """Two addresses of nginx before a service, over a connection that is used again.

    One sends bodies whole, the other one as they come, with upgrades.
    """
    if NGINX is None:
        pytest.skip("no nginx here: apt-get install nginx-light")
    ports = [free_port(), free_port()]
    host, port = service.address
    common = """
      proxy_pass http://larder; proxy_http_version 1.1; proxy_ignore_client_abort on;"""
    lines = f"""
  upstream larder {{ server {host}:{port}; keepalive 1; }}
  ignore_invalid_headers off; underscores_in_headers on; merge_slashes off; client_max_body_size 0;
  large_client_header_buffers 8 256k;
  server {{
    listen 127.0.0.1:{ports[0]};
    location / {{ {common} proxy_set_header Connection ""; }}
  }}
  server {{
    listen 127.0.0.1:{ports[1]};
    location / {{ {common} proxy_request_buffering off; proxy_buffering off;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade"; }}
  }}"""
    folder.mkdir(exist_ok=True)
    with nginx(NGINX, folder, lines):
        assert poll_until(lambda: all(map(listens, ports)))
        yield [("127.0.0.1", port) for port in ports]


@pytest.fixture(scope="module")
def fronts(service: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, int]]]:
    """The addresses of nginx before the service."""
    with behind_nginx(service, tmp_path_factory.mktemp("nginx")) as addresses:
        yield addresses


def hold_behind_nginx(
    fronts: list[tuple[str, int]], streams: Sequence[tuple[str, bytes]], *, is_random: bool = False
) -> None:
    """Fail unless another caller's request after each stream gets its own answer."""
    for number, (name, stream) in enumerate(streams):
        for front in fronts:
            received = all_bytes(front, stream + LAST)
            assert is_random or b'"id":"hidden' not in received, (name, stream)
            canary = f"canary{number}"
            answered = exchange(front, [last(canary)])
            assert [answer.ids for answer in answered.answers] == [[canary]], (name, stream, answered)


def test_behind_nginx_every_caller_gets_its_own_answer(fronts: list[tuple[str, int]]) -> None:
    hold_behind_nginx(fronts, [(case.name, case.stream) for case in CASES])


@pytest.mark.storm
def test_behind_nginx_every_caller_gets_its_own_answer_after_random_streams(fronts: list[tuple[str, int]]) -> None:
    rng, streams = random.Random(SEED), [case.stream for case in CASES]
    until_s = time.monotonic() + 10 * MINUTES
    while time.monotonic() < until_s:
        hold_behind_nginx(fronts, [("a random stream", mutated(rng, streams))], is_random=True)


def test_the_corpus_is_read_as_it_says() -> None:
    names = [case.name for case in CASES]
    assert len(names) > 130
    assert {case.is_refused for case in CASES} == {False, True}
    assert all(case.stream for case in CASES)


def test_a_planted_difference_is_noticed(judges: list[Judge]) -> None:
    # Given a service that would answer a hidden request, or a request that a judge refuses
    def answered(*ids: str) -> Exchange:
        bodies = [b'{"id":"%b"}' % name.encode() for name in ids]
        return Exchange([Answer(200, {}, body) for body in bodies], b"")

    two = get("a1") + get("a2")
    readings = {judge.name: judge.read(two) for judge in judges}
    assert violations(readings, answered("a1", "a2"), two) == []
    assert violations(readings, answered("a1"), two)
    assert violations(readings, answered("a1", "a3"), two)
    assert violations(readings, answered("a1", "a2", "a3"), two)
    assert violations(readings, answered("a1", "hidden1"), two)
    ambiguous_stream = next(case.stream for case in CASES if case.name == "chunks and a length")
    readings = {judge.name: judge.read(ambiguous_stream) for judge in judges}
    assert violations(readings, answered("b1", "a1"), ambiguous_stream)
    refusal = Answer(400, {"connection": "close"}, b"")
    assert 400 in REFUSALS
    assert violations(readings, Exchange([refusal], b""), ambiguous_stream) == []
    assert violations(readings, Exchange([refusal, refusal], b""), ambiguous_stream)
