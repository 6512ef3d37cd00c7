"""Tokens: requests per second of the server's processor time, beside another checkout asked with the same headers.

`python -m tests.bench.access [--before CHECKOUT]`. The baseline is that checkout's service, else this one's: without a
token for `open`, with `LARDER_TOKEN` for all others, so that the price of the header itself is in both.

- `ready`: `GET /v1/lookup/user_topk/{id}?k=20` from L1 over 32 keep-alive connections.
- `stored`: the same from Redis: L1 has room for nothing.
- `batch`: `POST /v1/lookup/user_topk` of 100 ids from L1.

each with no token (`open`), with `LARDER_TOKEN` (`default`), with a named token of 16 (`named`), with one that expires
(`expiring`), and with one that has quotas it never reaches (`metered`).
"""

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import orjson

from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools.harness import Options, Report, compare, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import per_cpu_s, request
from tests.integration.nights import environment
from tests.integration.token_files import TokenPlace

ROOT = Path(__file__).parents[2]
COUNTS = {"ready": 30_000, "stored": 10_000, "batch": 2_000}
"""Requests of a round, by kind."""
OTHER_TOKENS = 14


def requests_of(case: Case, kind: str, header: str) -> list[bytes]:
    """Return requests of one kind, with a token if `header` has one."""
    users = random.Random(0).sample(case.users, 200)
    if kind == "batch":
        bodies = [orjson.dumps({"entities": users[at : at + 100], "k": 20}) for at in range(0, 100, 10)]
        raw_requests = [request(f"/v1/lookup/{TABLE}", body) for body in bodies]
    else:
        raw_requests = [request(f"/v1/lookup/{TABLE}/{quote(user, safe='')}?k=20") for user in users]
    if not header:
        return raw_requests
    line = f"\r\nAuthorization: {header}\r\n".encode()
    return [raw_request.replace(b"\r\n", line, 1) for raw_request in raw_requests]


def variants(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Settings of each service, and the header that its callers send."""
    tokens = TokenPlace(folder / "tokens.json")
    for number in range(OTHER_TOKENS):
        tokens.add(f"other-{number}", "read")
    headers = {
        "open": "",
        "default": "Bearer sesame",
        "named": tokens.add("named", "read")["Authorization"],
        "expiring": tokens.add("expiring", "read", expires_at="2999-01-01T00:00:00+00:00")["Authorization"],
        "metered": tokens.add(
            "metered", "read", requests_per_s=1e9, entities_per_s=1e9, in_flight=10_000
        )["Authorization"],
    }  # fmt: skip
    file = {"LARDER_TOKENS_FILE": str(tokens.path)}
    settings = dict.fromkeys(("named", "expiring", "metered"), file)
    return {"open": {}, "default": {"LARDER_TOKEN": "sesame"}, **settings}, headers


def measure(report: Report, case: Case, kind: str, baseline_checkout: Path, options: Options) -> None:
    """Measure one kind of request, with a service for each variant on the first core."""
    settings, headers = variants(case.folder)
    count = COUNTS[kind] // (6 if options.quick else 1)
    more = {"LARDER_L1_BYTES": "1"} if kind == "stored" else {}
    with ExitStack() as stack:

        def serve(name: str, checkout: Path, variant_settings: dict[str, str]) -> Program:
            command = ["env", "-C", str(checkout), sys.executable, "-m", "serving", "--port", "0"]
            environ = environment(case.night, PYTHONPATH=str(checkout), **variant_settings, **more)
            log = case.folder / f"{name}.log"
            return stack.enter_context(program([*command, "--log-level", "warning"], log, environ))

        def run(target: Program, name: str) -> Callable[[], float]:
            raw_requests = requests_of(case, kind, headers[name])
            return lambda: per_cpu_s(target, raw_requests, count)

        baselines = {name: serve(f"before-{name}", baseline_checkout, settings[name]) for name in ("open", "default")}
        running = {name: serve(name, ROOT, variant_settings) for name, variant_settings in settings.items()}
        placed = pin_programs(*baselines.values(), *running.values())
        report.figures["placement"] = f"servers on {placed}"
        ratio_by_pair = compare(
            {name: run(target, name) for name, target in baselines.items()},
            {name: run(target, name) for name, target in running.items()},
            rounds=options.rounds,
        )
    for (baseline, name), ratio in ratio_by_pair.items():
        if (baseline == "open") == (name == "open"):
            report.ratios[f"{kind}_{name}_vs_before"] = ratio


def main() -> None:
    """Measure and report."""
    argv, baseline_checkout = sys.argv[1:], ROOT
    if "--before" in argv:
        at = argv.index("--before")
        baseline_checkout = Path(argv[at + 1]).absolute()
        del argv[at : at + 2]
    options = parse(__doc__ or "", argv)
    report = Report("access", ("uvicorn", "uvloop", "httptools"))
    report.figures["before"] = str(baseline_checkout)
    report.figures["unit"] = "requests per second of the server's processor time"
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        for kind in COUNTS:
            measure(report, case, kind, baseline_checkout, options)
    report.show(options)


if __name__ == "__main__":
    main()
