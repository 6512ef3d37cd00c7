"""Feast's feature server beside ours: the same records in its store, its requests, and what it answers."""

import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache.format.item_table import ItemTable
from cache.records import decode_record
from tests.bench.read_path import TABLE, Case
from tests.bench.tools import feast_store
from tests.bench.tools.http_load import Program, program
from tests.bench.tools.sockets import request
from tests.integration.nights import raw_records
from tests.opened import open_generation

ENVIRONMENT = Path(".venv-feast/bin")
ABSENT = "skipped: there is no Feast here; `make feast-env` installs it in .venv-feast"
_WHOLE_NAMES = {"full_feature_names": True}
"""A vector holds whole names, and Feast 0.67 finds it unreadable when it is asked for others."""
FORMS: Mapping[str, Mapping[str, Any]] = {
    "bytes": {"features": ("bytes:record",)},
    "bytes_vector": {"feature_service": "bytes_vector", **_WHOLE_NAMES},
    "arrays": {"features": ("arrays:items", "arrays:scores")},
    "arrays_vector": {"feature_service": "arrays_vector", **_WHOLE_NAMES},
}
"""What is asked of Feast, by form of the record: features, or the vector of them that it keeps per user."""
_PATH = "/get-online-features"


@dataclass(frozen=True, slots=True)
class Row:
    """What both services hold of a user: the record, and the first of its items with float32 scores."""

    record: bytes
    items: tuple[str, ...]
    scores: tuple[float, ...]


def rows_of(case: Case, k: int) -> dict[str, Row]:
    """The generation's records as they lie in its files."""
    manifest, root = open_generation(case.night.store(), case.generation)
    items = ItemTable.open(root, manifest)
    rows = {}
    for user, raw in raw_records(case.night, case.generation, case.users, TABLE).items():
        record = decode_record(manifest.tables[TABLE].layout, raw)
        if record.item_ordinals is None:
            raise RuntimeError(f"{TABLE} holds no lists")
        scores = tuple(record.numbers[:k].tolist())
        rows[user] = Row(raw, tuple(items.ids_of(record.item_ordinals[:k])), scores)
    return rows


def write_rows(path: Path, rows: Mapping[str, Row]) -> None:
    """The Parquet file that Feast materialises."""
    current_time = datetime.now(UTC)
    columns = {
        "user": pa.array(list(rows), pa.string()),
        "record": pa.array([row.record for row in rows.values()], pa.binary()),
        "items": pa.array([row.items for row in rows.values()], pa.list_(pa.string())),
        "scores": pa.array([row.scores for row in rows.values()], pa.list_(pa.float32())),
        "event_timestamp": pa.array([current_time] * len(rows), pa.timestamp("us", tz="UTC")),
    }
    pq.write_table(pa.table(columns), path)


def question(form: str, users: Sequence[str]) -> bytes:
    """Return the body of one request."""
    return json.dumps({**FORMS[form], "entities": {"user": users}}).encode()


def post(form: str, users: Sequence[str]) -> bytes:
    """Return a whole request."""
    return request(_PATH, question(form, users))


def columns_of(answer: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Values by feature, without its view, in the order of the users asked for; None where Feast has none."""
    names = [feature_name.rpartition("__")[2] for feature_name in answer["metadata"]["feature_names"]]
    return dict(zip(names, (feature_result["values"] for feature_result in answer["results"]), strict=True))


def differing(
    rows: Mapping[str, Row], forms: Mapping[str, Mapping[str, Any]], larder_answers: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Users whose row is not what Feast answered in every form and what our service answered (`larder_answers`)."""
    wrong: dict[str, None] = {}
    for suffix in ("", "_vector"):
        values_by_feature = columns_of(forms[f"bytes{suffix}"]) | columns_of(forms[f"arrays{suffix}"])
        answered_rows = zip(
            values_by_feature["record"],
            values_by_feature["items"],
            values_by_feature["scores"],
            larder_answers,
            strict=True,
        )
        for (user, row), (record, items, scores, answer) in zip(rows.items(), answered_rows, strict=True):
            is_equal = (
                record is not None
                and base64.b64decode(record) == row.record
                and tuple(items or ()) == tuple(answer["items"]) == row.items
                and _floats(scores) == _floats(answer["scores"]) == _floats(row.scores)
            )
            if not is_equal:
                wrong[user] = None
    return list(wrong)


def _floats(values: Sequence[float] | None) -> list[float]:
    float32_values: list[float] = np.array(values or (), np.float32).tolist()
    return float32_values


def call(url: str, body: bytes) -> Any:
    """Return the JSON answer to one JSON body."""
    http_request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(http_request, timeout=30.0) as response:  # noqa: S310 - our own loopback
        return json.load(response)


def fetch_features(feast: Program, form: str, users: Sequence[str]) -> Any:
    """One request's answer."""
    return call(feast.url + _PATH, question(form, users))


@contextmanager
def served(folder: Path, rows: Mapping[str, Row], redis_url: str) -> Iterator[tuple[Program, str]]:
    """A feature server with one worker over these rows, and its version.

    No access log, no worker that restarts after 1,000 requests, no registry that is read again meanwhile: its defaults
    are slower.
    """
    folder.mkdir()
    write_rows(folder / "users.parquet", rows)
    fill: list[str | Path] = [ENVIRONMENT / "python", feast_store.__file__, folder]
    completed_process = subprocess.run(
        [*fill, urlsplit(redis_url).netloc.rpartition("@")[2]], capture_output=True, text=True
    )  # fmt: skip
    if completed_process.returncode != 0:
        raise RuntimeError(f"Feast could not be filled:\n{completed_process.stderr[-2000:]}")
    filled = json.loads(completed_process.stdout.splitlines()[-1])
    serve: list[str | Path] = [ENVIRONMENT / "feast", "--chdir", folder, "serve", "--port", "0"]
    serve += ["--workers", "1", "--no-access-log", "--max-requests", "0", "-r", "0"]
    with program(serve, folder / "serving.log", {"HOME": str(folder)}) as parent:
        fetch_features(parent, "bytes", [next(iter(rows))])
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        if len(children) != 1:
            raise RuntimeError(f"one worker was asked for, not {len(children)}")
        yield replace(parent, pid=int(children[0])), str(filled["version"])
