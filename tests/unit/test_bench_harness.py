"""What a bench says of itself: what was left out, and what is not as the README has it."""

import json

import pytest

from tests.bench.bulk_load import held_by
from tests.bench.tools.harness import Options, Promise, Ratio, Report
from tests.bench.topk import cases

QUICK = Options(json=True, quick=True, rounds=5)


def made(value: float, aa: float = 1.0, quick: str = "") -> Report:
    report = Report("night")
    report.ratios["end_to_end"] = Ratio(value, aa, 5, value, 1.0)
    report.promises["end_to_end"] = Promise(0.7, quick=quick)
    return report


def test_a_bench_that_left_something_out_says_so_and_fails_for_programs(capsys):
    report = made(0.8)
    report.absent.append("real vectors")

    report.show(Options(json=False, quick=True, rounds=5))
    assert "NOT MEASURED: real vectors" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        report.show(QUICK)
    assert exit_info.value.code == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["absent"] == ["real vectors"]


@pytest.mark.parametrize(
    ("report", "quick", "lines"),
    [
        (made(0.71), True, []),
        (made(0.56, aa=2.0), True, []),  # void: nothing was measured
        (made(0.56, quick="few"), True, ["night.end_to_end is 0.56, the README says at least 0.7: few"]),
        (made(0.56, quick="few"), False, ["night.end_to_end is 0.56, the README says at least 0.7"]),
    ],
)  # fmt: skip
def test_a_ratio_that_is_not_what_the_readme_says_is_told_with_the_reason(report, quick, lines):
    assert report.short_of(quick=quick) == lines


def test_a_promise_may_have_two_bounds():
    report = Report("bulk_load")
    report.ratios["bytes_over_payload"] = Ratio(-0.22, 1.0, 1, -6.2, 28.0)
    report.promises["bytes_over_payload"] = Promise(minimum=1.0, maximum=1.01)

    assert report.to_json()["short_of"] == [
        "bulk_load.bytes_over_payload is -0.22, the README says at least 1 and at most 1.01"
    ]


def test_a_promise_without_its_ratio_is_an_error():
    report = made(0.8)
    report.promises["skew_p99_ms"] = Promise(maximum=100.0)

    with pytest.raises(ValueError, match="night promises skew_p99_ms and did not measure it"):
        report.show(Options(json=False, quick=False, rounds=5))


def test_without_their_data_topk_says_that_real_vectors_are_absent(monkeypatch):
    monkeypatch.delenv("LARDER_BENCH_DATA", raising=False)
    report = Report("topk")

    assert [name for name, _ in cases(8, report)] == ["random"]
    assert len(report.absent) == 1 and "real vectors" in report.absent[0]


def test_memory_of_a_record_is_measured_in_a_redis_that_held_nothing():
    values = {f"key-{number}": bytes(616) for number in range(1_000)}

    def write(client):
        client.mset(values)

    record_sizes = [held_by(write, len(values)) for _ in range(2)]

    assert all(616 < size_bytes < 1_000 for size_bytes in record_sizes)
