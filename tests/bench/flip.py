"""What callers feel of a publish and of a rollback: three service processes, one Redis, a fixed rate of requests.

`flip.p99_during_vs_before`: requests due from the pointer's move until a second after the last replica's swap, against
those of the second before the command. `flip.skew_p99_ms`: last swap minus first, by Redis' clock. Visible: from the
command to the last swap. All pooled over publishes and rollbacks in turn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from cache.control.control_keys import Control
from precompute.config.settings import NightConfig
from precompute.releases.recovery import roll_back
from precompute.steps import publish, verify
from tests.bench.tools.flip_calls import Recording, calling
from tests.bench.tools.harness import Options, Promise, Ratio, Report, parse
from tests.bench.tools.place import own_server
from tests.integration.fleet import control_of, fleet
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, histories, prepare, publish_night
from tests.polling import poll_until

SEED = 20_260
REPLICAS = 3
SETTLE_S = 3.0
"""Between the last of the night's own work and the first look, twice a window's length and more."""
AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """`rate`: requests a second over all replicas."""

    users: int
    items: int
    cycles: int
    rate: float


QUICK, FULL = Size(2_000, 300, 3, 600.0), Size(20_000, 2_000, 12, 1_000.0)


@dataclass(frozen=True, slots=True)
class Flip:
    """One move: Unix seconds of the command, the pointer, and each replica's swap."""

    is_rollback: bool
    asked_at: float
    moved_at: float
    swapped_at: tuple[float, ...]

    @property
    def skew_ms(self) -> float:
        """Milliseconds between the first replica's swap and the last's."""
        return 1000 * (max(self.swapped_at) - min(self.swapped_at))

    @property
    def visible_ms(self) -> float:
        """Milliseconds from the command to the last replica's swap."""
        return 1000 * (max(self.swapped_at) - self.asked_at)

    @property
    def lag_ms(self) -> float:
        """Milliseconds from the pointer's move to the last replica's swap."""
        return 1000 * (max(self.swapped_at) - self.moved_at)


def main() -> None:
    """Build, serve, flip and report."""
    options = parse("Publishes and rollbacks under load")
    size = QUICK if options.quick else FULL
    with TemporaryDirectory(prefix="larder-flip-") as folder, own_server(core=-1) as redis:
        report = measure(Path(folder), redis.url, size, options)
    report.show(options)


def measure(folder: Path, redis_url: str, size: Size, _options: Options) -> Report:
    """Run all cycles; return the figures of all of them together."""
    config = prepare(folder / "night", redis_url, seed=SEED, users=size.users, items=size.items)
    publish_night(config, DATA_UNTIL)
    second = build_verified(config, NEXT)
    paths = [f"/v1/lookup/user_topk/{quote(user, safe='')}?k=20" for user in sorted(histories(config))]
    with fleet(config, folder / "logs", count=REPLICAS, LARDER_POLL_S="1.0") as services, control_of(config) as control:
        urls = [service.url for service in services]
        with calling(urls, paths, rate=size.rate, seed=SEED, folder=folder) as calls:
            time.sleep(SETTLE_S)
            flips = []
            for cycle in range(size.cycles):
                if cycle:
                    verify.run(config, {"generation": second})
                flips += _cycle(config, control, second, cycle)
    return _report(flips, calls, size)


def _cycle(config: NightConfig, control: Control, second: str, cycle: int) -> list[Flip]:
    time.sleep(SETTLE_S)
    asked_at = time.time()
    publish.run(config, {"generation": second}, attempt=f"publish-{cycle}")
    published = _swapped(control, asked_at, is_rollback=False)
    time.sleep(SETTLE_S)
    asked_at = time.time()
    roll_back(config, target_generation=None, reason="the bench says so", attempt=f"back-{cycle}")
    rolled_back = _swapped(control, asked_at, is_rollback=True)
    return [published, rolled_back]


def _swapped(control: Control, asked_at: float, *, is_rollback: bool) -> Flip:
    pointer = control.read_pointer()
    if pointer is None:
        raise RuntimeError("there is no pointer")

    def swaps() -> list[float]:
        following_replicas = [replica for replica in control.replicas() if replica.pointer_epoch == pointer.epoch]
        return [replica.swapped_at for replica in following_replicas if replica.swapped_at is not None]

    time.sleep(AFTER_S)  # looking would be work on the same cores
    if not poll_until(lambda: len(swaps()) == REPLICAS):
        raise RuntimeError(f"{len(swaps())} of {REPLICAS} replicas follow epoch {pointer.epoch}")
    return Flip(is_rollback, asked_at, pointer.published_at, tuple(swaps()))


def _report(flips: Sequence[Flip], calls: Recording, size: Size) -> Report:
    durations_before = [calls.between(flip.asked_at - 1, flip.asked_at) for flip in flips]
    earlier = [calls.between(flip.asked_at - 2, flip.asked_at - 1) for flip in flips]
    staging = [calls.between(flip.asked_at, flip.moved_at) for flip in flips if not flip.is_rollback]
    during = [calls.between(flip.moved_at, max(flip.swapped_at) + AFTER_S) for flip in flips]
    rollbacks = [flip for flip in flips if flip.is_rollback]
    report = Report("flip", ("redis", "hiredis", "fastapi", "uvicorn", "onnxruntime"))
    report.ratios["p99_during_vs_before"] = Ratio(
        value=_p99_ms(during) / _p99_ms(durations_before),
        aa=_p99_ms(durations_before) / _p99_ms(earlier),
        rounds=len(flips),
        candidate=_p99_ms(during),
        baseline=_p99_ms(durations_before),
        tolerance=0.1,
    )
    skew_ms = float(np.percentile([flip.skew_ms for flip in flips], 99))
    report.ratios["skew_p99_ms"] = Ratio(skew_ms, 1.0, len(flips), skew_ms, 1.0)
    report.promises = {
        "p99_during_vs_before": Promise(maximum=1.2, quick="three cycles: a p99 of some thousand requests"),
        "skew_p99_ms": Promise(maximum=100.0),
    }
    report.figures = {
        "flips": len(flips),
        "replicas": REPLICAS,
        "users": size.users,
        "requests/s": size.rate,
        "requests before": sum(map(len, durations_before)),
        "requests during": sum(map(len, during)),
        "requests failed": calls.failed,
        "p50 before, ms": _percentile_ms(durations_before, 50),
        "p50 during, ms": _percentile_ms(during, 50),
        "p99 before, ms": _p99_ms(durations_before),
        "p99 during, ms": _p99_ms(during),
        "p99 during publishes, ms": _p99_ms(
            [durations for durations, flip in zip(during, flips, strict=True) if not flip.is_rollback]
        ),
        "p99 during rollbacks, ms": _p99_ms(
            [durations for durations, flip in zip(during, flips, strict=True) if flip.is_rollback]
        ),
        "p99 while staging, ms": _p99_ms(staging),
        "skew_p50_ms": float(np.percentile([flip.skew_ms for flip in flips], 50)),
        "rollback_visible_p99_ms": float(np.percentile([flip.visible_ms for flip in rollbacks], 99)),
        "lag_p99_ms": float(np.percentile([flip.lag_ms for flip in flips], 99)),
    }
    return report


def _percentile_ms(parts: Sequence[NDArray[np.float64]], percent: float) -> float:
    return float(np.percentile(np.concatenate(parts), percent)) * 1000


def _p99_ms(parts: Sequence[NDArray[np.float64]]) -> float:
    return _percentile_ms(parts, 99)


if __name__ == "__main__":
    main()
