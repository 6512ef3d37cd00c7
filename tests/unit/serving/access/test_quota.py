"""Quotas let through what they promise and no more, whoever asks in which order."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ConfigError
from serving.access.quota import (
    BURST_S,
    TABLE_ROWS,
    Quota,
    QuotaLimits,
    QuotaState,
    QuotaTable,
    Shortage,
    burst_s,
    quota_exceeded,
    row_key,
    state_after_charge,
)
from tests.fakes import FakeClock

RATES = st.one_of(st.floats(0.05, 2.0), st.floats(2.0, 10_000.0))
LIMITED = QuotaLimits(requests_per_s=10.0)


@given(RATES, st.lists(st.tuples(st.floats(0, 3), st.integers(1, 50)), min_size=1, max_size=200))
def test_never_more_than_the_rate_and_one_burst_in_any_time(rate: float, asked: list[tuple[float, int]]) -> None:
    limits, standing, now_s = QuotaLimits(entities_per_s=rate), QuotaState(), 1_000.0
    let_through: list[tuple[float, int]] = []
    for pause, amount in asked:
        now_s += pause
        charge_result = state_after_charge(standing, limits, now_s, 0, amount)
        if isinstance(charge_result, QuotaState):
            standing = charge_result
            let_through.append((now_s, amount))
    room = rate * burst_s(rate)
    for first in range(len(let_through)):
        begin = let_through[first][0]
        taken_amount = 0
        for at, amount in let_through[first:]:
            # The last request may be larger than a burst: it is let through with what is there, and later requests wait
            # for it.
            assert taken_amount + min(amount, room) <= (rate * (at - begin) + room) * (1 + 1e-6) + 1e-6
            taken_amount += amount


@given(RATES, st.integers(0, 30))
def test_who_asks_all_the_time_gets_the_rate_and_one_burst(rate: float, seconds: int) -> None:
    limits, standing, now_s, count = QuotaLimits(requests_per_s=rate), QuotaState(), 1_000.0, 0
    end = now_s + seconds
    while now_s <= end:
        charge_result = state_after_charge(standing, limits, now_s, 1, 0)
        if isinstance(charge_result, QuotaState):
            standing = charge_result._replace(requests_in_flight=0)
            count += 1
            if count > 2_000:
                return
        else:
            assert charge_result.retry_after_s > 0
            now_s += charge_result.retry_after_s + 1e-9
    assert abs(count - rate * (seconds + burst_s(rate))) <= 1 + 1e-3


@given(RATES, st.integers(1, 10_000))
def test_a_caller_that_waits_out_the_shortage_is_let_through(rate: float, amount: int) -> None:
    limits = QuotaLimits(entities_per_s=rate)
    first = state_after_charge(QuotaState(), limits, 5.0, 0, amount)
    assert isinstance(first, QuotaState)  # however much: a whole burst is there

    refused = state_after_charge(first, limits, 5.0, 0, amount)

    if isinstance(refused, Shortage):
        later = 5.0 + refused.retry_after_s
        assert isinstance(state_after_charge(first, limits, later, 0, amount), QuotaState)
        assert refused.kind == "entities_per_s" and refused.exceeded_limit == rate


def test_all_is_taken_or_nothing() -> None:
    limits = QuotaLimits(requests_per_s=100.0, entities_per_s=1.0, requests_in_flight_max=5)
    initial_state = QuotaState(entities_paid_until=10.0)

    charge_result = state_after_charge(initial_state, limits, 8.5, 1, 1)

    assert isinstance(charge_result, Shortage) and charge_result.kind == "entities_per_s"


def test_in_flight_has_its_own_bound() -> None:
    limits = QuotaLimits(requests_in_flight_max=2)

    assert isinstance(state_after_charge(QuotaState(requests_in_flight=1), limits, 0.0, 1, 5), QuotaState)
    charge_result = state_after_charge(QuotaState(requests_in_flight=2), limits, 0.0, 1, 0)
    assert isinstance(charge_result, Shortage) and charge_result.kind == "in_flight"
    assert isinstance(
        state_after_charge(QuotaState(requests_in_flight=2), limits, 0.0, 0, 7), QuotaState
    )  # its entities


def test_what_is_given_back_can_be_taken_again() -> None:
    clock = FakeClock()
    quota = Quota(row_key("a"), LIMITED, QuotaTable.create_private(), lambda: clock.now_s)
    clock.now_s = 50.0

    for _ in range(100):
        assert quota.enter_request(1) is None
        quota.give_back(1)
    let_through = sum(quota.enter_request(1) is None for _ in range(100))

    assert let_through == 10 * BURST_S


def test_tokens_have_rows_of_their_own_and_workers_share_them(tmp_path: Path) -> None:
    QuotaTable.create(tmp_path / "quotas", 4)
    first_table, second_table = (QuotaTable.open(tmp_path / "quotas", column) for column in (0, 3))

    assert [first_table.charge(row_key("a"), LIMITED, 7.0, 1, 0) for _ in range(5)] == [None] * 5
    assert [second_table.charge(row_key("a"), LIMITED, 7.0, 1, 0) for _ in range(5)] == [None] * 5
    assert isinstance(first_table.charge(row_key("a"), LIMITED, 7.0, 1, 0), Shortage)
    assert second_table.charge(row_key("b"), LIMITED, 7.0, 1, 0) is None
    assert first_table.read_state(row_key("a"), 7.0).requests_in_flight == 10


def test_a_worker_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    path, limits = tmp_path / "quotas", QuotaLimits(requests_in_flight_max=3)
    QuotaTable.create(path, 4)
    killed, surviving_table = QuotaTable.open(path, 0), QuotaTable.open(path, 1)
    for table in (killed, killed, surviving_table):
        assert table.charge(row_key("a"), limits, 1.0, 1, 0) is None
    assert isinstance(surviving_table.charge(row_key("a"), limits, 1.0, 1, 0), Shortage)

    QuotaTable.clear_column_in_file(path, 0)

    assert surviving_table.read_state(row_key("a"), 1.0).requests_in_flight == 1
    assert surviving_table.charge(row_key("a"), limits, 1.0, 1, 0) is None
    QuotaTable.open(path, 1)  # its successor begins with none
    assert killed.read_state(row_key("a"), 1.0).requests_in_flight == 0


def test_rows_of_tokens_that_rest_are_used_again() -> None:
    table, limits = QuotaTable.create_private(), QuotaLimits(requests_per_s=1.0)
    held_key = row_key("held")
    assert table.charge(held_key, QuotaLimits(requests_in_flight_max=5), 0.0, 1, 0) is None

    for number in range(3 * TABLE_ROWS):
        key = row_key(str(number))
        now_s = 10.0 * number
        assert table.charge(key, limits, now_s, 1, 0) is None
        table.leave(key)

    assert table.read_state(held_key, 1e9).requests_in_flight == 1
    assert table.read_state(row_key(str(3 * TABLE_ROWS - 1)), 0.0).requests_paid_until > 0


def test_a_table_that_is_full_says_so() -> None:
    table, limits = QuotaTable.create_private(), QuotaLimits(requests_in_flight_max=1)
    for number in range(TABLE_ROWS):
        assert table.charge(row_key(str(number)), limits, 0.0, 1, 0) is None

    with pytest.raises(ConfigError, match="512"):
        table.charge(row_key("one more"), limits, 0.0, 1, 0)


def test_a_column_beyond_the_table_is_refused(tmp_path: Path) -> None:
    QuotaTable.create(tmp_path / "quotas", 2)

    with pytest.raises(ConfigError):
        QuotaTable.open(tmp_path / "quotas", 2)


def _charge_until_deadline(path: str, column: int, begin: Any, count_queue: "multiprocessing.Queue[int]") -> None:
    table, limits, count = QuotaTable.open(Path(path), column), QuotaLimits(5_000.0), 0
    begin.wait(60)
    deadline = time.monotonic() + 2.0
    while (now_s := time.monotonic()) < deadline:
        if table.charge(row_key("a"), limits, now_s, 1, 0) is None:
            table.leave(row_key("a"))
            count += 1
    count_queue.put(count)


def test_four_processes_take_exactly_what_there_is(tmp_path: Path) -> None:
    path, context = tmp_path / "quotas", multiprocessing.get_context("spawn")
    QuotaTable.create(path, 5)
    count_queue, begin = context.Queue(), context.Barrier(5)
    processes = [
        context.Process(target=_charge_until_deadline, args=(str(path), column, begin, count_queue))
        for column in range(4)
    ]
    for process in processes:
        process.start()
    begin.wait(60)
    began_at = time.monotonic()
    total_count = sum(count_queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(10)
    ended_at = time.monotonic()

    # Every request was charged exactly once: if two processes had overwritten each other, `requests_paid_until` would
    # be another moment.
    paid_from = QuotaTable.open(path, 4).read_state(row_key("a"), ended_at).requests_paid_until - total_count / 5_000
    assert total_count > 5_000 and began_at - 0.2 <= paid_from <= began_at + 0.2
    assert total_count <= 5_000 * (ended_at - began_at + BURST_S)


@pytest.mark.parametrize(("wait_s", "said_s"), [(0.0002, 0.001), (0.25, 0.25), (0.2501, 0.251)])
def test_the_wait_that_a_refusal_names_is_never_too_short(wait_s: float, said_s: float) -> None:
    refusal = quota_exceeded(Shortage("requests_per_s", 10.0, wait_s))

    assert refusal.details["retry_after_seconds"] == said_s
