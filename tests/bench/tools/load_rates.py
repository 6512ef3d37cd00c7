"""Rates of loads into Redis without a reader, with which a load next to a reader is compared."""

import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import redis
from numpy.typing import NDArray

from cache.control.control_keys import Control
from cache.format.manifest import Manifest
from precompute.bulk.governor import open_governor
from precompute.bulk.load import load_part, unlink_pages
from precompute.config.settings import NightConfig
from tests.bench.bulk_load import AT_ONCE, KEYS, LAYOUT, Case
from tests.bench.tools.harness import AA_TOLERANCE, Ratio

WARM_SHARE = 0.25
"""Of a load flat out, left out of its rate."""
SETS = 15_000
REPEATS = 3


def loaded(url: str, case: Case, config: NightConfig, governed: bool, seconds: float) -> NDArray[np.float64]:
    """Load generation after generation for so long: (time, bytes so far) as Redis confirms them."""
    steps: list[tuple[float, float]] = [(time.perf_counter(), 0.0)]
    with redis.Redis.from_url(url, protocol=3) as client:
        control = Control(client, KEYS)
        ends_at = time.perf_counter() + seconds

        def advance(size_bytes: int) -> None:
            steps.append((time.perf_counter(), steps[-1][1] + size_bytes))
            if steps[-1][0] > ends_at:
                raise TimeoutError

        opened = open_governor(config.governor, control) if governed else nullcontext()
        with opened as governor:
            manifests: list[Manifest] = []
            try:
                while True:
                    name = f"20270101T000000Z-{len(manifests):012x}"
                    manifests.append(replace(case.manifest, generation=name))
                    load_part(
                        client, KEYS, manifests[-1], case.root, case.part,
                        chunk_bytes=config.load_chunk_bytes, progress=advance, governor=governor,
                    )  # fmt: skip
                    if len(manifests) > 1:
                        unlink_pages(client, KEYS, manifests[-2], governor=governor)
            except TimeoutError:
                step_array = np.array(steps)
            for manifest in manifests[-2:]:
                unlink_pages(client, KEYS, manifest, governor=governor)
    return step_array


def flat_out(url: str, case: Case, config: NightConfig, seconds: float) -> float:
    """Return bytes per second of the same loads without a reader, once they run."""
    steps = loaded(url, case, config, False, seconds)
    rate_starts_at, ends_at = steps[0, 0] + WARM_SHARE * (steps[-1, 0] - steps[0, 0]), steps[-1, 0]
    then = np.interp([rate_starts_at, ends_at], steps[:, 0], steps[:, 1])
    return float((then[1] - then[0]) / (ends_at - rate_starts_at))


def set_pipeline(client: "redis.Redis", case: Case, count: int) -> float:
    """Bytes per second of one `SET` per record, keys and values ready."""
    pipeline = client.pipeline(transaction=False)
    started_at = time.perf_counter()
    for at in range(0, count, AT_ONCE):
        batch_slice = slice(at, at + AT_ONCE)
        for name, record in zip(case.names[batch_slice], case.records[batch_slice], strict=True):
            pipeline.set(name, record)
        pipeline.execute()
    spent_s = time.perf_counter() - started_at
    for at in range(0, count, AT_ONCE):
        client.unlink(*case.names[at : at + AT_ONCE])
    return count * LAYOUT.size_bytes / spent_s


class Baselines:
    """Short runs of both, `seconds` of loads each time, before and after each stretch held against them."""

    def __init__(self, url: str, client: "redis.Redis", case: Case, config: NightConfig, seconds: float) -> None:
        self._url, self._client, self._case, self._config = url, client, case, config
        self._seconds = seconds
        self._measured: list[dict[str, float]] = []
        self._pairs: list[tuple[str, dict[str, float], dict[str, float]]] = []

    def measure(self) -> None:
        """Both once more, each the median of a few, so that one stall of the host is not the figure."""
        run_s = self._seconds / REPEATS
        runs = {
            "flat_out": lambda: flat_out(self._url, self._case, self._config, run_s),
            "set_pipeline": lambda: set_pipeline(self._client, self._case, SETS),
        }
        self._measured.append({name: statistics.median(run() for _ in range(REPEATS)) for name, run in runs.items()})

    def around(self, how: str) -> None:
        """The last two measurements stood around a stretch of this kind."""
        rates_before, after = self._measured[-2:]
        self._pairs.append((how, rates_before, after))

    def ratios(self, how: str, rates: list[float]) -> dict[str, Ratio]:
        """Rates of the stretches of one kind over what stood around each; all stretches' pairs tell the A/A."""
        ratio_by_name = {}
        for name in ("flat_out", "set_pipeline"):
            middle = [(a[name] + b[name]) / 2 for kind, a, b in self._pairs if kind == how]
            ratio_by_name[name] = Ratio(
                statistics.median(rate / baseline_rate for rate, baseline_rate in zip(rates, middle, strict=True)),
                statistics.median(after[name] / rates_before[name] for _, rates_before, after in self._pairs),
                len(rates), statistics.median(rates) / 1e6, statistics.median(middle) / 1e6,
                AA_TOLERANCE,
            )  # fmt: skip
        return ratio_by_name
