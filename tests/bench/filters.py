"""Lists under a filter, found by vectors, beside FAISS's own search with a selector; and beside lists without one.

- `vs_faiss_selector`: the best 100 of the items that pass, 40,981 x 128, one in ten passing, against
  `IndexFlatIP.search` with `IDSelectorBatch` of the same ids; one thread, a query at a time, answers per second.
- `half_vs_faiss_selector`, `hundredth_vs_faiss_selector`: the same where half and one in a hundred pass.
- `without`: `GET ...?k=20`, whose generation has attributes, over the same of one without: requests per second of the
  service's processor time, from L1.
- `from_list`: `GET ...?k=20&filter=...` that the stored list in L1 answers, over the same without a filter, as
  above. `from_list_first`: no request comes twice, so no answer is kept as bytes.
- `boosted`, `varied`: `GET ...?k=20&rerank=...` (a boost and a bound by attribute; likeness), over the same without on
  the complete way, as above.
"""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import quote

import faiss as faiss_module
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.filters.filtering import SubsetSearch
from tests.bench.tools.harness import Options, Report, alternate, compare, parse
from tests.bench.tools.http_load import Program, program
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import per_cpu_s, request
from tests.integration.nights import DATA_UNTIL, environment, histories, prepare, publish_night

Numbers = NDArray[np.float32]
Spelling = Callable[[str, int], str]
faiss: Any = faiss_module  # its type stubs lag behind what the module has
ITEMS, DIMS, K = 40_981, 128, 100
USERS = 200
PASSING_SHARES = {"": 0.1, "half_": 0.5, "hundredth_": 0.01}


def by_vectors(report: Report, options: Options) -> None:
    """Measure in this process, on one thread."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((ITEMS, DIMS), np.float32)
    users = rng.standard_normal((64, DIMS), np.float32)
    index, subset_search = faiss.IndexFlatIP(DIMS), SubsetSearch(vectors)
    index.add(vectors)
    faiss.omp_set_num_threads(1)
    for name, passing_share in PASSING_SHARES.items():
        passing_ordinals = np.flatnonzero(rng.random(ITEMS) < passing_share)
        selector = faiss.SearchParameters(sel=faiss.IDSelectorBatch(passing_ordinals))
        theirs = index.search(users, K, params=selector)[1]
        larder_lists = np.stack([subset_search.search(user, passing_ordinals, K)[0] for user in users])
        overlap = np.mean([len(np.intersect1d(*pair)) / K for pair in zip(larder_lists, theirs, strict=True)])
        report.figures[f"{name}overlap"] = float(overlap)

        def faiss_rate(selector: object = selector) -> float:
            return _rate(lambda user_vector: index.search(user_vector[None], K, params=selector), users)

        def our_rate(passing_ordinals: Any = passing_ordinals) -> float:
            return _rate(lambda user_vector: subset_search.search(user_vector, passing_ordinals, K), users)

        ratio_by_name = alternate(faiss_rate, {"larder": our_rate}, rounds=options.rounds)
        report.ratios[f"{name}vs_faiss_selector"] = ratio_by_name["larder"]


def _rate(answer: Callable[[Numbers], object], users: Numbers) -> float:
    started = perf_counter()
    for user in users:
        answer(user)
    return len(users) / (perf_counter() - started)


def by_lists(report: Report, redis_url: str, folder: Path, options: Options) -> None:
    """Measure over HTTP, from L1."""
    config_without_prices = prepare(folder / "plain", redis_url, users=1_000, items=2_000)
    publish_night(config_without_prices, DATA_UNTIL)
    config = prepare(folder / "shop", redis_url, users=1_000, items=2_000)
    path = config.path("items.parquet")
    table = pq.read_table(path)
    prices = np.random.default_rng(1).uniform(0, 100, len(table))
    pq.write_table(table.append_column("price", pa.array(prices)), path)
    config = replace(config, sources=replace(config.sources, item_attributes=("price",)))
    publish_night(config, DATA_UNTIL)
    users = random.Random(0).sample(sorted(histories(config)), USERS)
    count = 2_000 if options.quick else 5_000
    filter_ = "&filter=" + quote('{"<":["price",80]}', safe="")
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    with (
        program(serve, folder / "log", environment(config)) as filtering,
        program(serve, folder / "plain.log", environment(config_without_prices)) as without,
    ):
        # Asks for an age that every answer meets, so that the request takes the complete path.
        complete = "&max_age_seconds=1000000000"
        boosted = (
            complete
            + "&rerank="
            + quote(
                '{"boost":[{"filter":{"<":["price",20]},"factor":2}],"diversify":{"attribute":"price","most":2}}',
                safe="",
            )
        )
        varied = complete + "&rerank=" + quote('{"diversify":{"mmr":0.7}}', safe="")

        def run(target: Program, spell: Spelling, numbers: Iterator[int], more: str) -> float:
            request_numbers = list(itertools.islice(numbers, count))
            ids = [spell(users[number % len(users)], number) for number in request_numbers]
            sending = [request(f"/v1/lookup/user_topk/{user_id}?k=20{more}") for user_id in ids]
            return per_cpu_s(target, sending, count)

        for name, spell, baseline, less, more in (
            ("without", quoted, without, "", ""),
            ("from_list", quoted, filtering, "", filter_),
            ("from_list_first", spelt, filtering, "", filter_),
            ("boosted", quoted, filtering, complete, boosted),
            ("varied", quoted, filtering, complete, varied),
        ):
            numbers = itertools.count()
            ratio_by_pair = compare(
                {"baseline": partial(run, baseline, spell, numbers, less)},
                {"candidate": partial(run, filtering, spell, numbers, more)},
                rounds=options.rounds,
            )
            (report.ratios[name],) = ratio_by_pair.values()


def quoted(id_: str, _: int) -> str:
    """Quote the id as a client does: a ready answer is found by the request's bytes."""
    return quote(id_, safe="")


def spelt(id_: str, number: int) -> str:
    """Percent-encode other characters of the id for each number, so that no request repeats."""
    number //= USERS
    return "".join(
        f"%{byte:02X}" if not chr(byte).isalnum() or byte > 127 or number >> at & 1 else chr(byte)
        for at, byte in enumerate(id_.encode())
    )


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("filters", ("faiss-cpu", "numpy"))
    by_vectors(report, options)
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        by_lists(report, server.url, Path(folder), options)
    report.show(options)


if __name__ == "__main__":
    main()
