"""The bench that LoadGen drives: samples, search, reading of logs, and LoadGen itself where it is installed."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.judges.environment import ABSENT, is_there
from tests.bench.loadgen import __main__ as bench
from tests.bench.loadgen.runs import Judged, Target, highest_valid, read_summary
from tests.bench.loadgen.samples import PATH, K, write_samples
from tests.bench.read_path import Case
from tests.bench.tools.harness import Report

judged = pytest.mark.skipif(not is_there(), reason=ABSENT)
SUMMARY = """\
================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Completed samples per second    : 20099.61
Result is : VALID
  Min duration satisfied : Yes
Early Stopping Result:
 * Run successful.
99.00 percentile latency (ns)   : 8500000
target_latency (ns): 10000000
"""


def run_of(summary: str, count_by_status: dict[str, int]) -> Judged:
    return Judged(read_summary(summary), {"bad": count_by_status}, Path("log"))


def test_a_summary_says_result_rate_and_latency() -> None:
    run = run_of(SUMMARY, {})

    assert (run.is_valid, run.per_s, run.latency_ms("99.00")) == (True, 20099.61, 8.5)


def test_what_the_log_calls_invalid_and_what_was_not_answered_is_not_valid() -> None:
    assert not run_of(SUMMARY.replace(": VALID", ": INVALID"), {}).is_valid
    assert not run_of(SUMMARY, {"503": 1}).is_valid
    assert not run_of("", {}).is_valid


@given(st.floats(0.11, 1.5), st.integers(1, 12))
def test_the_search_ends_just_below_what_is_too_fast(limit: float, steps: int) -> None:
    tried: list[float] = []

    def is_valid(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit * 1_000

    highest_rate = highest_valid(is_valid, 1_000, steps=steps)

    assert len(tried) == steps and highest_rate in (0, *tried)
    assert highest_rate <= limit * 1_000
    assert highest_rate == 0 or highest_rate >= min(limit, 1.0) * 1_000 * 10 ** -(2**-steps) * 0.999


def test_a_search_in_which_nothing_was_valid_finds_nothing() -> None:
    assert highest_valid(lambda _: False, 1_000, steps=4) == 0


class Tiring:
    """A target whose long runs are valid up to a rate."""

    def __init__(self, limit: float) -> None:
        self.limit, self.rates = limit, list[float]()

    def run(self, scenario: str, rate: float, seconds: float) -> Judged:
        self.rates.append(rate)
        summary = SUMMARY if rate <= self.limit else SUMMARY.replace(": VALID", ": INVALID")
        return run_of(summary, {})


def test_the_long_run_goes_down_until_it_is_valid() -> None:
    tiring = Tiring(91.0)

    rate, judged = bench.last(tiring, 100.0, 60.0)  # type: ignore[arg-type]

    assert judged.is_valid and rate == tiring.rates[-1] == pytest.approx(90.25)
    assert tiring.rates == pytest.approx([95.0, 90.25])


def test_the_long_run_gives_up_and_says_what_the_log_says() -> None:
    rate, judged = bench.last(Tiring(1.0), 100.0, 60.0)  # type: ignore[arg-type]

    assert not judged.is_valid and rate == pytest.approx(100 * 0.95**bench.TRIES)


def test_figures_of_a_long_run_are_in_the_logs_own_words() -> None:
    report = Report("loadgen")
    lines = {f"{percentile} percentile latency (ns)": "1500000" for percentile in ("50.00", "90.00", "99.90")}
    driven = {"bad": {}, "seconds": 60.0, "strangers": 100, "live": 99, "busy": 0.5}

    bench.describe(report, "larder", 95.0, Judged(read_summary(SUMMARY) | lines, driven, Path("folder")))

    assert report.figures["larder: Server, LoadGen says"] == "VALID at 95 queries/s"
    assert report.figures["larder: Server, p99 ms"] == 8.5
    assert report.figures["larder: strangers, answered by the model"] == "100, 99"
    assert report.figures["larder: log"] == "folder"


def test_answers_that_were_not_200_are_said_whatever_the_log_calls_valid(tmp_path: Path) -> None:
    it = Target("larder", "", tmp_path, tmp_path, PATH, K)
    for count_by_status in ({}, {"503": 2}):
        driven = {"bad": count_by_status, "version": "mlcommons-loadgen 6"}
        it.runs.append(Judged({"Scenario": "Offline", "Result is": "VALID"}, driven, tmp_path))
    report = Report("loadgen")

    bench.describe_others(report, it)

    assert report.figures["larder: Offline, runs that LoadGen calls VALID"] == "1 of 2"
    assert report.absent == ["larder, Offline: not 200: {'503': 2}"]


def case(folder: Path) -> Case:
    users = [f"user {number}" for number in range(100)]
    return Case(folder, None, "g", users, [f"item-{number}" for number in range(200)])  # type: ignore[arg-type]


def test_samples_are_users_by_zipf_and_a_twentieth_of_strangers(tmp_path: Path) -> None:
    stranger_share = write_samples(case(tmp_path), tmp_path / "samples", 4_000)

    samples = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    known_users = [sample["entity"][0] for sample in samples if len(sample["entity"]) == 1]
    assert stranger_share == pytest.approx(1 - len(known_users) / len(samples)) == pytest.approx(0.05, abs=0.015)
    largest_share = max(known_users.count(user) for user in set(known_users)) / len(known_users)
    assert largest_share == pytest.approx(1 / sum(1 / rank for rank in range(1, 101)), abs=0.03)


def test_a_strangers_number_fits_where_it_goes(tmp_path: Path) -> None:
    write_samples(case(tmp_path), tmp_path / "samples", 200)

    lines = (tmp_path / "samples").read_text().splitlines()
    strangers = [sample for sample in map(json.loads, lines) if len(sample["entity"]) > 1]
    for sample in strangers:
        head, _, body = "000000000042".join(sample["request"]).partition("\r\n\r\n")
        entity = json.loads("000000000042".join(sample["entity"]))
        assert head.startswith(f"POST {PATH} HTTP/1.1") and f"Content-Length: {len(body)}" in head
        assert json.loads(body) == {"entities": [entity], "k": K}
        assert entity["id"] == "stranger-000000000042" and len(entity["history"]) >= 5


def test_without_loadgen_the_bench_says_what_to_do_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "is_there", lambda: False)
    monkeypatch.setattr("sys.argv", ["loadgen", "--json", "--logs", "some", "--quick"])

    bench.main()

    printed_report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed_report["figures"] == {"LoadGen": ABSENT} and "make judges-env" in ABSENT


class Answering(BaseHTTPRequestHandler):
    """Answers as its server is told, and writes down who asked."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.asked.append((self.path, body))
        self.send_response(server.status)
        self.send_header("Content-Length", "15")
        self.end_headers()
        self.wfile.write(b'"source":"live"')

    do_GET = do_POST = _answer  # noqa: N815 - names that the base class looks for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""


@pytest.fixture
def answering() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads, server.status, server.asked = True, 200, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def target(server: Any, folder: Path) -> Target:
    write_samples(case(folder), folder / "samples", 100)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return Target("it", url, folder / "samples", folder, PATH, K, bound_s=60.0, connections=4)


@judged
def test_loadgen_calls_a_slow_enough_server_run_valid_and_every_stranger_is_another(
    answering: Any, tmp_path: Path
) -> None:
    run = target(answering, tmp_path).run("Server", 700, 1.0)

    assert run.is_valid and run.lines["target_qps"] == "700", (run.lines, run.driven)
    numbers_by_request = [re.findall(r"stranger-(\d+)", body.decode()) for _, body in answering.asked if body]
    strangers = [number for numbers in numbers_by_request for number in numbers]
    assert len(set(strangers)) == len(strangers) == run.driven["strangers"] == run.driven["live"] > 0
    assert len(answering.asked) >= 600
    assert (run.log / "mlperf_log_detail.txt").exists()


@judged
def test_a_server_that_refuses_is_not_valid_whatever_the_log_says(answering: Any, tmp_path: Path) -> None:
    answering.status = 503

    run = target(answering, tmp_path).run("Offline", 200, 0.5)

    assert run.lines["Scenario"] == "Offline" and not run.is_valid
    assert run.driven["bad"] == {"503": len(answering.asked)} and run.per_s > 0


@judged
def test_a_query_of_many_is_one_request(answering: Any, tmp_path: Path) -> None:
    run = target(answering, tmp_path).run("MultiStream", 50, 0.5, per_query=8)

    assert run.driven["bad"] == {} and run.latency_ms("99.00") > 0
    assert {path for path, _ in answering.asked} == {PATH}
    assert all(len(json.loads(body)["entities"]) == 8 for _, body in answering.asked)
