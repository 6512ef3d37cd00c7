"""Public models of many kinds, fitted, imported without a line of JSON, and asked over HTTP: what comes back of each.

Each model is fitted on the same drawn clicks (`fitted/cut.py`), becomes a folder by its adapter, and `larder night` and
`larder serve` run there with a real Redis. Of 200 users, `parity` is the share of the library's own 20 best items that
the service answers, `recall` is recall@20 of the fifth that was held out, by the library and by Larder, `seconds` are
those of the import, the night and the start of the service up to its answer.

`--python LIBRARY=PATH` runs the models of a library by an interpreter that has it, and `--only NAME` one model.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from cache.process.redis_server import join_or_start_server
from tests.bench.fitted.cut import EVALUATED_COUNT, TOP, draw
from tests.bench.fitted.fitted import Kind
from tests.bench.tools.harness import Report, parse
from tests.integration.larder.commands import ROOT, larder, running

KINDS = {
    "implicit ALS": Kind("implicit", "factors", "als"),
    "implicit BPR": Kind("implicit", "factors", "bpr"),
    "implicit LMF": Kind("implicit", "factors", "lmf"),
    "scikit-learn TruncatedSVD": Kind("scikit-learn", "factors", "truncated_svd"),
    "scikit-learn NMF": Kind("scikit-learn", "factors", "nmf"),
    "EASE": Kind("larder", "factors", "ease_weights"),
    "SLIM": Kind("scikit-learn", "factors", "slim"),
    "LightFM WARP": Kind("rectools-lightfm", "factors", "warp"),
    "RecTools PureSVD": Kind("RecTools", "factors", "pure_svd"),
    "RecBole BPR": Kind("recbole", "libraries", "pairs"),
    "RecBole SASRec": Kind("recbole", "libraries", "sas_rec"),
    "torch-rechub YoutubeDNN": Kind("torch-rechub", "libraries", "youtube"),
    "sentence-transformers": Kind("sentence-transformers", "libraries", "sentences"),
    "torch, mean": Kind("torch", "towers", "mean"),
    "torch, GRU": Kind("torch", "towers", "gru"),
    "torch, attention": Kind("torch", "towers", "attention"),
}


def measure(kind: Kind) -> dict[str, Any]:
    """Fit, import, run a night and a service; return the figures of one kind of model."""
    cut = draw()
    fitted = kind.fit(cut)
    expected_lists = fitted.lists()
    with TemporaryDirectory() as folder_name, join_or_start_server(Path(folder_name) / "redis") as redis:
        folder, environ = Path(folder_name) / "shop", {"REDIS_URL": redis.url}
        started = time.perf_counter()
        import_report = fitted.put(folder)
        imported = time.perf_counter() - started
        larder(folder, "night", "--quiet", environ=environ)
        entities: list[dict[str, Any]] = [{"id": str(user)} for user in cut.evaluated_users]
        with running(folder, "serve", "--port", "0", line_prefix="Larder serves on ", environ=environ) as url:
            request_body = {"k": TOP, "entities": entities}
            response = httpx.post(f"{url}/v1/lookup/user_topk", json=request_body, timeout=60)
            seconds = time.perf_counter() - started
        answers = response.raise_for_status().json()["answers"]
    lists = np.array([[int(item) for item in answer["items"]] for answer in answers], np.int64)
    overlap_counts = [
        len(np.intersect1d(served_list, theirs)) for served_list, theirs in zip(lists, expected_lists, strict=True)
    ]
    return {
        "library": f"{kind.library} {kind.version()}",
        "from": "/".join(sorted({answer["source"] for answer in answers})),
        "parity": float(np.mean(overlap_counts)) / TOP,
        "recall_library": cut.recall(expected_lists),
        "recall": cut.recall(lists),
        "import_s": imported,
        "seconds": seconds,
        "bundle_mb": import_report.bundle_bytes / 1e6,
        "cannot": list(import_report.cannot),
    }


def table(report: Report) -> str:
    """Rows in Markdown, as the documents have them."""
    lines = [
        "| model | library | parity | its own recall@20 | recall@20 | seconds | what it cannot do |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in KINDS:
        if name in report.figures:
            row = json.loads(str(report.figures[name]))
            cells = [
                name, row["library"], f"{row['parity']:.3f}", f"{row['recall_library']:.3f}", f"{row['recall']:.3f}",
                f"{row['seconds']:.1f}", "; ".join(row["cannot"][-1:]),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def elsewhere(python: str, name: str) -> dict[str, Any]:
    """Measure with another interpreter."""
    completed_process = subprocess.run(
        [python, "-m", "tests.bench.fitted.models", "--only", name, "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=900,
    )  # fmt: skip
    if completed_process.returncode:
        raise RuntimeError(
            f"{name} by {python}: {completed_process.stderr[-2_000:]}{completed_process.stdout[-2_000:]}"
        )
    figures = json.loads(completed_process.stdout.splitlines()[-1])["figures"]
    row: dict[str, Any] = json.loads(figures[name])
    return row


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", action="append", choices=KINDS)
    parser.add_argument("--python", action="append", default=[])
    arguments, remaining_argv = parser.parse_known_args()
    options = parse(f"{__doc__.splitlines()[0]} Also: --only NAME, --python LIBRARY=PATH", remaining_argv)
    python_by_library = dict(assignment.partition("=")[::2] for assignment in arguments.python)
    report = Report("models", ("onnxruntime", "faiss-cpu"))
    for name in arguments.only or KINDS:
        kind = KINDS[name]
        if kind.library in python_by_library:
            row = elsewhere(python_by_library[kind.library], name)
        elif kind.version():
            row = measure(kind)
        else:
            report.absent.append(f"{name}: pip install {kind.library}, or --python {kind.library}=PATH")
            continue
        report.figures[name] = json.dumps(row)
        print(f"{name}: {report.figures[name]}", file=sys.stderr, flush=True)
    report.figures["users asked"] = EVALUATED_COUNT
    print(table(report))
    report.show(options)


if __name__ == "__main__":
    main()
