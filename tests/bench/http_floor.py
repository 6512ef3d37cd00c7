"""An L1 hit over HTTP beside the least that HTTP costs in Python.

- `l1_vs_bare_asgi`: `GET /v1/lookup/user_topk/{id}?k=20` from L1 over a raw ASGI app that sends the same bytes.
- `l1_vs_fastapi_route`: the same over a plain FastAPI route that returns the same prebuilt bytes.

All on uvicorn with uvloop and httptools, 32 keep-alive connections over 200 ids. The figure is requests per second of
the server's processor time: what it would answer on a core of its own.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from tests.bench.read_path import TABLE, Case, body_of, make_case
from tests.bench.tools.harness import Options, Report, compare, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import per_cpu_s, request
from tests.integration.nights import environment


def measure(report: Report, case: Case, redis_url: str, options: Options) -> None:
    """Measure all three servers on the first core."""
    users = random.Random(0).sample(case.users, 200)
    paths = [f"/v1/lookup/{TABLE}/{quote(user, safe='')}?k=20" for user in users]
    count = 5_000 if options.quick else 30_000
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    body = case.folder / "body.json"
    with program(serve, case.folder / "serving.log", environment(case.night)) as larder:
        body.write_bytes(body_of(larder, paths))
        bare_app: list[str | Path] = [sys.executable, "-m", "tests.bench.tools.bare_asgi", body]
        plain_app: list[str | Path] = [sys.executable, "-m", "tests.bench.tools.plain_fastapi"]
        plain_app += [body, redis_url]
        with (
            program(bare_app, case.folder / "bare.log") as bare,
            program(plain_app, case.folder / "plain.log") as fastapi_server,
        ):
            report.figures["placement"] = f"servers on {pin_programs(larder, bare, fastapi_server)}"
            report.figures["body bytes"] = body.stat().st_size
            report.figures["unit"] = "requests per second of the server's processor time"
            lookups = [request(path) for path in paths]

            def run(target: Program, requests: list[bytes]) -> Callable[[], float]:
                return lambda: per_cpu_s(target, requests, count)

            ratio_by_pair = compare(
                {"bare_asgi": run(bare, [request("/")]), "fastapi_route": run(fastapi_server, [request("/prebuilt")])},
                {"l1": run(larder, lookups)},
                rounds=options.rounds,
            )
    for (baseline, candidate), ratio in ratio_by_pair.items():
        report.ratios[f"{candidate}_vs_{baseline}"] = ratio


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("http_floor", ("fastapi", "uvicorn", "uvloop", "httptools"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        measure(report, case, server.url, options)
    report.show(options)


if __name__ == "__main__":
    main()
