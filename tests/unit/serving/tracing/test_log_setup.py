"""What a log line holds, what it never holds, and how many there are."""

import logging
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from serving.process.log_setup import (
    BURST_RECORDS,
    TEXT_LENGTH_MAX,
    JsonFormatter,
    LogRateLimit,
    Redactor,
    TextFormatter,
    passwords_of,
)
from serving.requests.request_record import (
    CURRENT_RECORD,
    ParentSpan,
    RequestFacts,
    RequestRecord,
    StageTime,
    note_stage,
)
from serving.tracing.observer import RequestLog, accepted_id, log, new_request_id, request_of, server_timing
from tests.fakes import FakeClock

SECRETS = Redactor({"t0k3n"} | passwords_of(
    "redis://larder:p%40ss@host:6379/0", "redis+sentinel://host:1/svc?client_name=c&sentinel_password=q+q%21"
))  # fmt: skip
ASKED = RequestFacts("GET", "/v1/lookup/{table}/{entity}", "user_topk", "u-secret")


def record(text: str, *values: object, **more: Any) -> logging.LogRecord:
    log_record = logging.LogRecord("some.where", logging.WARNING, "f.py", 7, text, values, None)
    log_record.__dict__.update(more)
    return log_record


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What the request log writes."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, level = Keep(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield records
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach redis://larder:p%40ss@host:6379/0", "the password is p@ss", "Authorization: Bearer t0k3n",
        "bearer somebody-elses", "t0k3n" * 3, "s3://key:hidden@bucket/x",
        "sentinels want q+q%21, that is q q!", "redis://h?db=1&password=hidden&client_name=x",
        "'redis+sentinel://h:1/svc?sentinel_password=hidden' does not answer",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [JsonFormatter, TextFormatter])
def test_no_secret_reaches_a_line(form: type[logging.Formatter], text: str) -> None:
    line = form(SECRETS).format(record("%s", text))  # type: ignore[arg-type]

    for secret in ("p%40ss", "p@ss", "t0k3n", "somebody-elses", "hidden", "q+q%21", "q q!"):
        assert secret not in line
    assert "***" in line


def test_no_secret_reaches_a_line_through_an_exception_or_a_field() -> None:
    try:
        raise ValueError("t0k3n")
    except ValueError as error:
        failed = record("failed", exc_info=(ValueError, error, error.__traceback__))
    failed.larder_fields = {"deep": {"er": "t0k3n"}}
    line_fields = orjson.loads(JsonFormatter(SECRETS).format(failed))

    assert "t0k3n" not in str(line_fields) and "ValueError: ***" in line_fields["exception"]
    assert "t0k3n" not in TextFormatter(SECRETS).format(failed)


def test_a_text_line_begins_with_the_time_of_its_json_line() -> None:
    log_record = record("said")

    time_text = orjson.loads(JsonFormatter(SECRETS).format(log_record))["time"]
    assert TextFormatter(SECRETS, 3).format(log_record) == f"{time_text} WARNING worker 3 some.where: said"


def test_a_line_is_one_object_that_names_the_request_and_the_worker() -> None:
    request_record = RequestRecord(0.0, "req-1", ParentSpan("a" * 32, "b" * 16, 1))
    current = CURRENT_RECORD.set(request_record)
    try:
        line = JsonFormatter(SECRETS, 3).format(record("two\nlines %d", 5))
    finally:
        CURRENT_RECORD.reset(current)
    line_fields = orjson.loads(line)

    assert "\n" not in line
    assert line_fields["message"] == "two\nlines 5" and line_fields["level"] == "warning"
    assert (line_fields["request_id"], line_fields["trace_id"], line_fields["worker"]) == ("req-1", "a" * 32, 3)


def test_a_request_that_is_over_is_in_no_line_and_takes_no_stage() -> None:
    request_record = RequestRecord(0.0, "req-1", last_body_piece=b"large")
    current = CURRENT_RECORD.set(request_record)
    try:
        note_stage("stored", 1.0)
        request_record.end()
        note_stage("stored", 1.0)
        line = orjson.loads(JsonFormatter(SECRETS).format(record("x")))
    finally:
        CURRENT_RECORD.reset(current)

    assert "request_id" not in line and len(request_record.stage_times) == 1 and request_record.last_body_piece == b""


def test_a_text_that_no_encoding_takes_is_logged_all_the_same() -> None:
    assert orjson.loads(JsonFormatter(SECRETS).format(record("\ud800")))["message"] == "?"


def test_a_text_without_end_is_cut() -> None:
    assert len(SECRETS("x" * 10 * TEXT_LENGTH_MAX)) < TEXT_LENGTH_MAX + 100


def test_a_storm_of_one_kind_is_bounded_says_so_and_hides_no_other() -> None:
    clock = FakeClock()
    limit = LogRateLimit(2.0, clock)
    passed = sum(limit.filter(record("x")) for _ in range(100_000))
    other_record = record("y")
    other_record.lineno = 8
    clock.tick(1.0)
    after = [record("x") for _ in range(5)]
    passed_records = [log_record for log_record in after if limit.filter(log_record)]

    assert passed == BURST_RECORDS and limit.filter(other_record)
    assert len(passed_records) == 2
    assert passed_records[0].larder_dropped == 100_000 - BURST_RECORDS  # type: ignore[attr-defined]
    assert orjson.loads(JsonFormatter(SECRETS).format(passed_records[0]))["dropped"] == 100_000 - BURST_RECORDS


def test_errors_and_slow_requests_are_always_told_and_a_share_of_the_others(lines: list[logging.LogRecord]) -> None:
    draws = iter([0.5, 0.05, 0.5])
    journal = RequestLog(sampled_share=0.1, slow_after_s=1.0, draw_random_share=lambda: next(draws))
    for status, seconds in ((200, 0.1), (200, 0.2), (404, 0.3), (200, 1.0), (500, 0.4), (503, 2.0)):
        request_record = RequestRecord(0.0, "r", http_status=status)
        if (level := journal.choose_level(request_record, seconds)) is not None:
            journal.write(level, request_record, ASKED, seconds)

    levels_and_seconds = [(log_record.levelname, vars(log_record)["larder_fields"]["seconds"]) for log_record in lines]
    assert levels_and_seconds == [("INFO", 0.2), ("WARNING", 1.0), ("ERROR", 0.4), ("ERROR", 2.0)]


def test_a_line_of_a_request_says_where_time_went_and_never_whose_it_was(lines: list[logging.LogRecord]) -> None:
    request_record = RequestRecord(
        0.0, "r", http_status=200, last_body_piece=b'{"id":"u-secret","source":"l2","generation":"g"}'
    )
    request_record.stage_times += [StageTime("stored", 1.0, 0.25, 1), StageTime("stored", 2.0, 0.5, 1)]
    RequestLog(sampled_share=1.0, slow_after_s=9.0).write(logging.INFO, request_record, ASKED, 1.0)
    line = orjson.loads(JsonFormatter(SECRETS).format(lines[0]))

    assert line["stages"] == {"stored": 0.75} and line["sources"] == {"l2": 1}
    assert line["table"] == "user_topk" and line["status"] == 200
    assert "u-secret" not in str(line) and "u-secret" not in TextFormatter(SECRETS).format(lines[0])


def test_server_timing_sums_each_stage_in_milliseconds() -> None:
    request_record = RequestRecord(
        0.0, "r", stage_times=[StageTime("parse", 0.1, 0.001, 0), StageTime("live", 0.2, 0.0205, 3)]
    )

    assert server_timing(request_record, 0.03) == b"parse;dur=1.000, live;dur=20.500, total;dur=30.000"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/lookup/user_topk/a/b", ("GET", "/v1/lookup/{table}/{entity}", "user_topk", "a/b")),
        ("POST", "/v1/lookup/user_topk", ("POST", "/v1/lookup/{table}", "user_topk", None)),
        ("GET", "/v1/lookup/made-up/a", ("GET", "/v1/lookup/{table}/{entity}", None, "a")),
        ("POST", "/v1/lookup", ("POST", "/v1/lookup", None, None)),
        ("GET", "/v1/lookup/", ("GET", "other", None, None)),
        ("BREW", "/anything/u-secret", ("other", "other", None, None)),
        ("GET", "", ("GET", "other", None, None)),
    ],
)  # fmt: skip
def test_a_path_becomes_a_route_of_few(method: str, path: str, expected: tuple[Any, ...]) -> None:
    assert request_of({"method": method, "path": path}, {"user_topk"}) == expected


@pytest.mark.parametrize("raw_request_id", [b"", b"x" * 129, b"a b", b"a\nb", b"<x>", "ü".encode(), b'"', None])
def test_a_request_id_that_could_spoil_a_log_is_not_taken(raw_request_id: bytes | None) -> None:
    assert accepted_id(raw_request_id) is None


def test_request_ids_are_taken_or_made() -> None:
    assert accepted_id(b"9f2c-A_b.c~d:e+f/g=h@i") == "9f2c-A_b.c~d:e+f/g=h@i"
    assert len({new_request_id() for _ in range(1_000)}) == 1_000 and accepted_id(new_request_id().encode())
