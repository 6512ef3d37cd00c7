"""Nights that copy what did not change, each beside the full night over the same inputs, by processor time.

Timed are the night's own steps as in the bench `night`: `begin`, `embed_items`, `score`, `assemble` and `load` (index,
quantized models and gates are the same for both, and made once). A ratio is the processor seconds of the one over
those of the other; Redis' own are not counted. Both write the same generation, and its pages are compared.

- `none`: nothing but the cut changed (at most 0.12 is wanted).
- `users_1pct`, `users_10pct`: so many users have clicked since (0.15 and 0.25).
- `items_01pct`: a tenth of the users, and 0.1 % of the items are others (0.45).
- `all`: every user has clicked since (1.03): what looking for copies costs where there are none.

Vectors and users are those of the bench `night`; the catalogue is a table, of which some items are left out at first.
"""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from cache.model.tower import Histories
from cache.process.host import usable_cores
from cache.process.redis_server import join_or_start_server
from cache.store.artefacts import generation_path, sha256_of
from precompute.builds.build import Build
from precompute.builds.reports import shard_report_name
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, Sources, TableConfig
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score
from precompute.steps.assemble import AssembleResult
from precompute.steps.night import Night, run_night
from tests.bench.night import COPIES, COPIES_QUICK, DIMS, REMADE, K, drawn_case, write_interactions
from tests.bench.tools.harness import Promise, Report, compare, parse
from tests.bench.tools.topk_cases import NO_DATA, real_case, real_file

FIRST = datetime(2026, 11, 1, tzinfo=UTC)
NEW_CLICKS = 3
COST_RATIOS_MAX = {"none": 0.12, "users_1pct": 0.15, "users_10pct": 0.25, "items_01pct": 0.45, "all": 1.03}
CHANGED_USER_SHARES = {"none": 0.0, "users_1pct": 0.01, "users_10pct": 0.1, "items_01pct": 0.1, "all": 1.0}
OTHER_ITEMS = 0.001


@dataclass(slots=True)
class RepeatableNight:
    """The inputs of one more night, which can be computed repeatedly, in full or with copies."""

    config: NightConfig
    cut: datetime
    generation: str = ""

    def run(self, reuse: Literal["auto", "off"]) -> float:
        """Return the processor seconds from the sources to Redis."""
        config = replace(self.config, reuse=reuse)
        self._clear()
        started = time.process_time()
        build = self._scored(config)
        if not self.generation:
            self.generation = str(build["generation"])
            index.run(config, build)
            quantize.run(config, build)
            started = time.process_time()
        load.run(config, build)
        return time.process_time() - started

    def _scored(self, config: NightConfig) -> AssembleResult:
        build = begin.run(config, data_until=self.cut.isoformat(), run_after=None)
        embed_items.run(config, build)
        score.run(config, build, build["shards"])
        return assemble.run(config, build)

    def _clear(self) -> None:
        if not self.generation:
            return
        root = self.root
        for name in ("tables", "directory", "items", "work/partition", "work/inputs", "work/reasons"):
            shutil.rmtree(root / name, ignore_errors=True)
        for path in [*(root / "work").glob("shard-*.json"), *map(root.joinpath, REMADE)]:
            path.unlink(missing_ok=True)
        with redis.Redis.from_url(str(self.config.redis_url)) as client:
            for key in client.scan_iter(f"*{self.generation}*", count=1000):
                client.delete(key)

    @property
    def root(self) -> Path:
        """Folder of the generation."""
        return self.config.store().local(generation_path(self.generation))

    def pages(self) -> dict[str, str]:
        """Checksums of all pages."""
        return {page_file.name: sha256_of(page_file) for page_file in sorted((self.root / "tables").rglob("*.pages"))}

    def reasons(self) -> dict[str, int]:
        """Users by reason."""
        build, user_count_by_reason = (Build.of(self.config, {"generation": self.generation}), dict[str, int]())
        for shard in range(self.config.shards):
            reasons = build.need_report(shard_report_name(shard))["users"]["reasons"] or {}
            for name, count in reasons.items():
                user_count_by_reason[name] = user_count_by_reason.get(name, 0) + count
        return user_count_by_reason


def write_day(path: Path, histories: Histories, copies: int, user_share: float, items: int, at: datetime) -> None:
    """Write three clicks for each user of a share."""
    rng = np.random.default_rng(7)
    count = copies * len(histories)
    clicking_rows = rng.choice(count, int(user_share * count), replace=False)
    users = pa.array([f"{row % len(histories)}-{row // len(histories)}" for row in clicking_rows.tolist()])
    users = users.take(pa.array(np.repeat(np.arange(len(clicking_rows)), NEW_CLICKS)))
    clicked_items = (items * rng.random(NEW_CLICKS * len(clicking_rows)) ** 2.5).astype(np.int64)
    seconds = int(at.timestamp()) - rng.integers(1, 86_400, len(clicked_items))
    pq.write_table(
        pa.table({"user": users, "item": pa.array(clicked_items).cast(pa.string()), "timestamp": seconds}), path
    )


def main() -> None:
    """Measure and report."""
    options = parse(__doc__.splitlines()[0])
    copies = COPIES_QUICK if options.quick else COPIES
    file, report = real_file(), Report("changed", ("faiss-cpu", "onnxruntime", "pyarrow", "redis"))
    with TemporaryDirectory(prefix="larder-bench-") as folder_name:
        folder = Path(folder_name)
        bundle, sources = folder / "bundle", folder / "interactions"
        sources.mkdir()
        case = drawn_case(bundle) if file is None else real_case(file, bundle, 1 << 30, DIMS)
        write_interactions(sources / "day-0.parquet", case.histories, copies)
        names = np.array([raw.decode() for raw in Bundle.open(bundle).item_ids])
        swapped_count = max(1, int(OTHER_ITEMS * len(names)))
        swapped_indexes = np.random.default_rng(3).permutation(len(names))[: 2 * swapped_count]
        write_items(folder, np.delete(names, swapped_indexes[:swapped_count]))
        (folder / "redis").mkdir()
        with join_or_start_server(folder / "redis") as running:
            config = NightConfig(
                artifacts=str(folder / "artifacts"), state=str(folder / "state"), bundle=str(bundle),
                redis_url=running.url, shards=copies, device="off",
                sources=Sources((str(sources),), item_features=str(folder / "items.parquet")),
                tables={"user_topk": TableConfig("user_topk", k=K)},
            )  # fmt: skip
            run_night(Night(config, "bench", FIRST.isoformat()))
            report.figures |= {
                "vectors": "drawn" if file is None else "real", "users": len(case.histories) * copies,
                "interactions": len(case.histories.indices) * copies, "items": len(names), "dims": DIMS,
                "cores": usable_cores(),
            }  # fmt: skip
            for number, (name, user_share) in enumerate(CHANGED_USER_SHARES.items(), 1):
                at = FIRST + timedelta(days=number)
                day = sources / "day-1.parquet"
                day.unlink(missing_ok=True)
                if user_share:
                    write_day(day, case.histories, copies, user_share, len(names), at)
                if name == "items_01pct":
                    write_items(folder, np.delete(names, swapped_indexes[swapped_count:]))
                measure(report, options.rounds, name, RepeatableNight(config, at))
                if name == "items_01pct":
                    write_items(folder, np.delete(names, swapped_indexes[:swapped_count]))
    if file is None:
        report.absent.append(f"vectors trained on real data: {NO_DATA}; these are drawn")
    report.show(options)


def measure(report: Report, rounds: int, name: str, night: RepeatableNight) -> None:
    """One scenario."""
    full: Callable[[], float] = partial(night.run, "off")
    copying: Callable[[], float] = partial(night.run, "auto")
    full()
    pages = night.pages()
    copying()
    if night.pages() != pages:
        raise SystemExit(f"{name}: the night with copies has other pages than the full one")
    reasons = night.reasons()
    ratio_by_pair = compare({"full": full}, {"changed": copying}, rounds=rounds, rounds_max=rounds + 2, warm=False)
    report.ratios[name] = ratio = ratio_by_pair["full", "changed"]
    print(f"{name}: {ratio.value:.3f}, A/A {ratio.aa:.3f}", file=sys.stderr, flush=True)
    report.figures[f"{name}_seconds"] = round(ratio.candidate, 2)
    report.figures[f"{name}_full_seconds"] = round(ratio.baseline, 2)
    report.figures |= {f"{name}_{reason}": count for reason, count in reasons.items()}
    report.promises[name] = Promise(maximum=COST_RATIOS_MAX[name], quick="fixed costs weigh more on so few users")


def write_items(folder: Path, names: np.ndarray) -> None:
    """The catalogue, as a table."""
    pq.write_table(pa.table({"item": pa.array(names)}), folder / "items.parquet")


if __name__ == "__main__":
    main()
