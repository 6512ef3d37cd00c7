"""Rates of GPUs that a plan goes by: those that were measured, or what a rehearsal finds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.errors import ConfigError
from cache.topk.compiled import K_MAX
from precompute.planning import trial
from precompute.planning.cards import CARDS, MEASURED_ITEMS
from precompute.planning.trial import DeviceRate, Trial, rate_from_rehearsal, rate_from_table
from tests.devices import DEVICE


def test_the_table_grows_with_items_and_dimensions() -> None:
    for cost in CARDS["h200"].list_costs:
        rate = rate_from_table(MEASURED_ITEMS, cost.dims, 100).users_per_s
        assert rate == pytest.approx(cost.users_per_s)
        fewer = rate_from_table(MEASURED_ITEMS // 4, cost.dims, 100).users_per_s
        assert fewer == pytest.approx(cost.users_per_s / (1 - 0.75 * cost.item_share))
    at = [rate_from_table(1_000_000, dims, 100).users_per_s for dims in (32, 128, 200, 256, 1024)]
    assert at == sorted(at, reverse=True) and min(at) > 0
    measured = f"{CARDS['h200'].list_costs[0].users_per_s:,}"
    measurement_text = f"NVIDIA H200 did {measured} users/s with 1,000,000 items of 128, K = 100"
    assert rate_from_table(9, 8, 100).rate_origin.endswith(measurement_text)
    assert rate_from_table(9, 8, 1000).rate_origin.endswith(f"{measurement_text} (not 1000)")


def vectors(count: int) -> Any:
    return np.random.default_rng(count).standard_normal((count, 16), np.float32)


def test_a_rehearsal_is_of_the_device_itself() -> None:
    pytest.importorskip("torch", reason="make torch-env")

    rate = rate_from_rehearsal(DEVICE, vectors(64), vectors(300), "inner_product", 500)

    assert rate is not None and rate.users_per_s > 0 and "64 users" in rate.rate_origin
    assert rate_from_rehearsal(DEVICE, vectors(4), np.zeros((3, 16), np.float32), "cosine", 2) is None
    assert rate_from_rehearsal(DEVICE, vectors(4)[:0], vectors(300), "inner_product", 500) is None


def on(monkeypatch: pytest.MonkeyPatch, device_names: tuple[str, ...], rate: DeviceRate | None) -> DeviceRate:
    """What a plan for 2,000 items of 32 numbers goes by, from a sample with 500 items of 16."""
    monkeypatch.setattr(trial, "devices", lambda device_setting: device_names)
    monkeypatch.setattr(trial, "rate_from_rehearsal", lambda *_: rate)
    fake_trial: Any = SimpleNamespace(
        encode_sample=lambda: (vectors(8), vectors(500)), bundle=SimpleNamespace(metric="cosine")
    )
    shape: Any = SimpleNamespace(item_count=2_000, dims=32)
    return Trial.measure_device_rate(fake_trial, "auto", shape, 100)


def test_a_plan_goes_by_the_gpus_here_and_else_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rate_from_table(2_000, 32, 100)

    assert on(monkeypatch, (), None) == table
    assert on(monkeypatch, ("cuda:0",), None) == table
    single_gpu_rate = on(monkeypatch, ("cuda:0",), DeviceRate(800.0, "a rehearsal"))
    assert single_gpu_rate == DeviceRate(100.0, "a rehearsal")  # eight times the numbers
    two = on(monkeypatch, ("cuda:0", "cuda:1"), DeviceRate(800.0, "a rehearsal"))
    assert two == DeviceRate(200.0, "2 x a rehearsal")


def test_a_gpu_that_is_demanded_and_not_on_this_host_leaves_the_plan_to_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_device_setting: str) -> tuple[str, ...]:
        raise ConfigError("device 'cuda' is missing", field="device")

    monkeypatch.setattr(trial, "devices", refused)
    fake_trial, shape = SimpleNamespace(), SimpleNamespace(item_count=2_000, dims=32)

    rate = Trial.measure_device_rate(fake_trial, "cuda", shape, 100)  # type: ignore[arg-type]

    table = rate_from_table(2_000, 32, 100)
    assert rate.users_per_s == table.users_per_s
    assert rate.rate_origin == f"{table.rate_origin}; device 'cuda' cannot be used on this host"


def test_no_list_is_too_long_for_the_kernels_that_the_table_is_of() -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's: make torch-env")
    from precompute.device import scorer
    from precompute.device.fused import FETCH_MAX

    assert (
        max(K_MAX + K_MAX // k_divisor + extra_candidates for k_divisor, extra_candidates in scorer._FETCH_MARGINS)
        <= FETCH_MAX
    )
