"""Feast's feature server with its Redis store beside ours, on the same records, Redis and core.

- `vs_feast_best_batch1_l1`: requests with one user from L1 over Feast's; `vs_feast_best_batch1_l2`: the same from L2.
- `vs_feast_best_batch100`: users of requests with 100 from L2 as Arrow IPC streams over Feast's;
  `vs_feast_best_batch100_json`: the same as JSON.

Feast holds each 616-byte record as one feature of bytes. It is asked for the feature and, with `precompute_online`, for
the vector of features that it keeps per user; whichever is faster in these rounds is the best. `vs_feast_...` rows are
of the feature, `..._bytes_vector` of the vector; `..._arrays` and `..._arrays_vector` (not with `--quick`) ask for 20
items and scores as arrays, which is what our answers hold. Before anything is timed, a sample of all answers
is compared with the night's files. The figure is per second of the server's processor time: what it would answer on a
core of its own, which favours a server that leaves its core idle; rates by the clock and shares of the core stand
beside it.

`make feast-env` installs Feast, from pinned versions in `tests/bench/tools/feast.txt`; without it the bench says so and
ends.
"""

import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client.calls import write_arrow_ids
from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools import feast_side
from tests.bench.tools.feast_side import ABSENT, ENVIRONMENT, FORMS, Row, call, differing, fetch_features, rows_of
from tests.bench.tools.harness import Options, Report, Run, compare, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import own_server, pin, unpin
from tests.bench.tools.sockets import Driven, drive, request
from tests.integration.nights import environment

K = 20
BATCH = 100
CONNECTIONS = {1: 32, BATCH: 4}
"""Requests under way, by users per request."""
COUNTS = {
    **{f"feast {form}": {1: 3_000, BATCH: 200} for form in FORMS},
    "larder L1": {1: 40_000},
    "larder L2": {1: 10_000},
    "larder L2 binary": {BATCH: 1_000},
    "larder L2 JSON": {BATCH: 1_000},
}
"""Requests of one run, by users per request, so that each takes seconds; `--quick`: a fifth."""
BEST_OF = ("bytes", "bytes_vector")
"""Forms of the record as bytes; the better one is quoted."""
_NO_L1 = "1"
"""Bytes: nothing fits."""


class Drivers:
    """Timed runs, and what each of them saw."""

    def __init__(self, quick: bool) -> None:
        self._count_divisor = 5 if quick else 1
        self.runs_by_name: dict[str, list[Driven]] = defaultdict(list)

    def run(self, name: str, target: Program, requests: Sequence[bytes], batch: int) -> Run:
        """A run whose figure is users per second of the server's processor time."""
        count = COUNTS[name][batch] // self._count_divisor

        def measure_rate() -> float:
            driven = drive(target, requests, count, CONNECTIONS[batch])
            self.runs_by_name[f"{name}, {batch}"].append(driven)
            return batch * driven.per_cpu_s

        return measure_rate

    def figures(self, report: Report) -> None:
        """Requests per second by the clock, and shares of the core."""
        for name, runs in self.runs_by_name.items():
            rate, busy = (statistics.median(map(of, runs)) for of in _RUN_FIGURES)
            report.figures[f"{name}: requests/s, share of its core"] = f"{rate:,.0f}, {busy:.2f}"


_RUN_FIGURES: tuple[Callable[[Driven], float], ...] = (lambda run: run.per_s, lambda run: run.busy)


def check_same(rows: dict[str, Row], feast: Program, larders: Sequence[Program]) -> None:
    """Check that every side answers with the contents of the night's files; raise RuntimeError otherwise."""
    sample = dict(random.Random(0).sample(sorted(rows.items()), BATCH))
    users = list(sample)
    forms = {form: fetch_features(feast, form, users) for form in FORMS}
    body = json.dumps({"entities": users, "k": K}).encode()
    for larder in larders:
        larder_answers = call(f"{larder.url}/v1/lookup/{TABLE}", body)["answers"]
        if wrong := differing(sample, forms, larder_answers):
            raise RuntimeError(f"the two services hold different records of {', '.join(wrong[:5])}")


def measure(report: Report, case: Case, rows: dict[str, Row], redis_url: str, options: Options) -> None:
    """Servers on the first core; the sender and Redis on the last."""
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    envs = {"l1": environment(case.night), "l2": environment(case.night, LARDER_L1_BYTES=_NO_L1)}
    with ExitStack() as stack:
        larder = {
            tier: stack.enter_context(program(serve, case.folder / f"{tier}.log", env)) for tier, env in envs.items()
        }
        feast, version = stack.enter_context(feast_side.served(case.folder / "feast", rows, redis_url))
        report.figures["feast"] = f"{version}, one worker"
        check_same(rows, feast, list(larder.values()))
        where = pin_programs(feast, *larder.values())
        report.figures["placement"] = f"servers on {where}; sender on {pin(0, -1)}, Redis too"
        report.figures["unit"] = "users per second of the server's processor time"
        drivers = Drivers(options.quick)
        forms = BEST_OF if options.quick else tuple(FORMS)
        for batch in (1, BATCH):
            user_batches = _batches(case.users, batch)
            baselines = {
                form: drivers.run(f"feast {form}", feast, [feast_side.post(form, ids) for ids in user_batches], batch)
                for form in forms
            }
            candidates = {
                suffix: drivers.run(f"larder {name}", larder[tier], requests, batch)
                for suffix, (name, tier, requests) in _larder_requests(user_batches, batch).items()
            }
            ratio_by_pair = compare(
                baselines, candidates, rounds=options.rounds, rounds_max=7 if options.quick else None
            )
            fastest_form = best_form({form: ratio_by_pair[form, ""].baseline for form in BEST_OF})
            report.figures[f"feast's best form, {batch}"] = fastest_form
            for (form, suffix), ratio in ratio_by_pair.items():
                name = f"vs_feast_batch{batch}{suffix}"
                report.ratios[name + ("" if form == "bytes" else f"_{form}")] = ratio
                if form == fastest_form:
                    report.ratios[best_name(batch, suffix)] = ratio
        drivers.figures(report)


def best_form(rates: Mapping[str, float]) -> str:
    """The form with the greatest rate."""
    return max(rates, key=rates.__getitem__)


def best_name(batch: int, suffix: str) -> str:
    """The ratio to Feast's best form; of one user the tier is always named."""
    return f"vs_feast_best_batch{batch}" + (suffix or ("_l1" if batch == 1 else ""))


def _larder_requests(user_batches: list[list[str]], batch: int) -> dict[str, tuple[str, str, list[bytes]]]:
    """By suffix of the ratio: what it is called, the tier it comes from, the requests."""
    path = f"/v1/lookup/{TABLE}"
    if batch == 1:
        gets = [request(f"{path}/{quote(user, safe='')}?k={K}") for (user,) in user_batches]
        return {"": ("L1", "l1", gets), "_l2": ("L2", "l2", gets)}
    texts = [request(path, json.dumps({"entities": ids, "k": K}).encode()) for ids in user_batches]
    streams = [request(path, write_arrow_ids(ids, {"k": str(K)}), ARROW_MEDIA_TYPE) for ids in user_batches]
    return {"": ("L2 binary", "l2", streams), "_json": ("L2 JSON", "l2", texts)}


def _batches(users: list[str], batch: int) -> list[list[str]]:
    rng = random.Random(0)
    return [rng.sample(users, batch) for _ in range(200 if batch == 1 else 64)]


def main() -> None:
    """Measure and report, or say what is missing."""
    options = parse(__doc__ or "")
    report = Report("peers", ("redis", "hiredis", "fastapi", "uvicorn", "uvloop"))
    if not (ENVIRONMENT / "feast").exists():
        report.figures["feast"] = ABSENT
    else:
        with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
            case = make_case(Path(folder), server.url, options.quick)
            measure(report, case, rows_of(case, K), server.url, options)
        unpin()
    report.show(options)


if __name__ == "__main__":
    main()
