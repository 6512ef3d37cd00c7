"""Training of the reference bundle beside the night that follows: seconds and peak memory of both, by users.

Each size has 12 drawn clicks a user, popular and rare items, most of them of the user's taste, at random times.
`train` (the choice of its numbers included) and `night` run as programs of their own, one after the other, over the
same files with a real Redis.
`train over night` is the time of one over that of the other (lower is better), by the clock, once.

`--gowalla FOLDER` (with `train.txt.gz` and `test.txt.gz`, a line for each user: the user, then the items) trains on
public data instead, and says what the chosen shape finds of the test items: Recall@20 and NDCG@20, all items ranked.
"""

import argparse
import gzip
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp

from cache.process.redis_server import join_or_start_server
from precompute.reference.matrix_factorisation import UserItemMatrix, build_matrix, train_tables
from precompute.reference.train import choose_shape
from tests.bench.tools.harness import Options, Report, parse

ITEMS, CLICKS, DIMS = 20_000, 12, 128
TASTES, LIKED = 50, 0.7
"""Groups of items, one of which a user likes, and the share of the clicks that fall into it."""
USERS, USERS_QUICK = (250_000, 1_000_000, 2_000_000), (50_000,)
TOP = 20
STEP = 100_000


def write(path: Path, users: int) -> None:
    """Clicks of users, as Parquet."""
    rng = np.random.default_rng(0)
    kinds = {"user": pa.string(), "item": pa.string(), "timestamp": pa.int64()}
    schema = pa.schema(list(kinds.items()))
    names = pa.array([f"item-{number}" for number in range(ITEMS)])
    with pq.ParquetWriter(path, schema) as file:
        for start in range(0, users, STEP):
            count = min(STEP, users - start) * CLICKS
            items = (ITEMS * rng.random(count) ** 2).astype(np.int64)
            numbers = start + np.arange(count) // CLICKS
            liked = items - items % TASTES + numbers % TASTES
            items = np.where(rng.random(count) < LIKED, liked, items)
            owners = pa.array(numbers).cast(pa.string())
            times = 1_700_000_000 + rng.integers(0, 10_000_000, count)
            file.write_table(pa.table([owners, names.take(pa.array(items)), times], schema=schema))


def settings(folder: Path, url: str) -> Path:
    """Settings of both programs."""
    path = folder / "larder.toml"
    path.write_text(
        f'redis_url = "{url}"\nartifacts = "artifacts"\nstate = "state"\nbundle = "bundle"\nshards = 8\n'
        f'[sources]\ninteractions = ["clicks.parquet"]\n[reference]\ndims = {DIMS}\n'
        '[tables.user_topk]\nkind = "user_topk"\nk = 100\n'
    )
    return path


def run(config: Path, command: str) -> tuple[float, float]:
    """(seconds, peak GiB) of a command of `precompute`."""
    command_line = [sys.executable, "-m", "precompute", "--config", str(config), "--quiet", command]
    started = time.perf_counter()
    with (log := config.parent / f"{command}.log").open("wb") as file:
        to_log = [(os.POSIX_SPAWN_DUP2, file.fileno(), number) for number in (1, 2)]
        child = os.posix_spawn(sys.executable, command_line, os.environ, file_actions=to_log)
        _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(log.read_text()[-2_000:])
    return time.perf_counter() - started, usage.ru_maxrss / (1 << 20)


def sizes(report: Report, options: Options) -> None:
    """Both programs over growing numbers of users."""
    for users in USERS_QUICK if options.quick else USERS:
        with TemporaryDirectory() as folder_name, join_or_start_server(Path(folder_name) / "redis") as redis:
            write(Path(folder_name) / "clicks.parquet", users)
            config = settings(Path(folder_name), redis.url)
            trained, training_gib = run(config, "train")
            chosen_training = json.loads((Path(folder_name) / "bundle" / "bundle.json").read_bytes())["training"]
            night, night_gib = run(config, "night")
        report.figures[f"{users:,} users, train"] = f"{trained:.1f} s, {training_gib:.2f} GiB"
        report.figures[f"{users:,} users, night"] = f"{night:.1f} s, {night_gib:.2f} GiB"
        report.figures[f"{users:,} users, chosen"] = json.dumps(chosen_training)
        report.figures[f"{users:,} users, train over night"] = trained / night


def pairs(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(users, items) of a file with a line for each user."""
    with gzip.open(path, "rt") as file:
        rows = [np.array(line.split(), np.int64) for line in file]
    users = np.concatenate([np.repeat(row[0], len(row) - 1) for row in rows])
    return users, np.concatenate([row[1:] for row in rows])


def evaluate_ranking(
    train: sp.csr_matrix, test: sp.csr_matrix, rows: np.ndarray, items: np.ndarray
) -> tuple[float, float]:
    """(Recall@20, NDCG@20), means over users with a test item; recall is hits over test items."""
    discounts = 1 / np.log2(np.arange(TOP) + 2)
    ideal, recalls, gains = np.cumsum(discounts), [], []
    test_users = np.flatnonzero(np.diff(test.indptr))
    for start in range(0, len(test_users), 1_000):
        batch_users = test_users[start : start + 1_000]
        scores = (train[batch_users] @ rows) @ items.T
        train_clicks = train[batch_users].tocoo()
        scores[train_clicks.row, train_clicks.col] = -np.inf
        top_items = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
        order = np.argsort(-np.take_along_axis(scores, top_items, axis=1), axis=1, kind="stable")
        is_test_item = test[batch_users].toarray() > 0
        hits = np.take_along_axis(is_test_item, np.take_along_axis(top_items, order, axis=1), axis=1)
        counts = is_test_item.sum(axis=1)
        recalls.append(hits.sum(axis=1) / counts)
        gains.append(hits @ discounts / ideal[np.minimum(counts, TOP) - 1])
    return float(np.concatenate(recalls).mean()), float(np.concatenate(gains).mean())


def gowalla(report: Report, folder: Path) -> None:
    """Chosen inside the training data, measured on the test data."""
    train_pairs, test_pairs = pairs(folder / "train.txt.gz"), pairs(folder / "test.txt.gz")
    size = [int(max(train_pairs[axis].max(), test_pairs[axis].max())) + 1 for axis in (0, 1)]
    started = time.perf_counter()
    rng = np.random.default_rng(0)
    choice = choose_shape(*train_pairs, size[1], 256, rng)
    data = UserItemMatrix.of(build_matrix(*train_pairs, size))
    [(_, vectors)] = train_tables(data, [choice.shape], rng)
    report.figures["train_s"] = time.perf_counter() - started
    recall, gain = evaluate_ranking(build_matrix(*train_pairs, size), build_matrix(*test_pairs, size), *vectors)
    report.figures |= {"chosen": json.dumps(choice.report_fields()), "recall_at_20": recall, "ndcg_at_20": gain}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gowalla", type=Path)
    arguments, remaining_argv = parser.parse_known_args()
    options = parse(f"{__doc__.splitlines()[0]} Also: --gowalla FOLDER", remaining_argv)
    report = Report("train", ("numpy", "scipy"))
    if arguments.gowalla:
        gowalla(report, arguments.gowalla)
    else:
        sizes(report, options)
    report.show(options)


if __name__ == "__main__":
    main()
