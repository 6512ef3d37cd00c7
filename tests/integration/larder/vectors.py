"""Tables of vectors, the service's answers from them, and the expected answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

TOP = 10

Floats = NDArray[np.float32]


def write(path: Path, name: str, prefix: str, rows: Floats) -> None:
    """Write a table of ids (the prefix and a number) and vectors."""
    ids = [f"{prefix}{number}" for number in range(len(rows))]
    pq.write_table(pa.table({name: ids, "vector": list(rows)}), path)


def top_items(scores: Floats, k: int = TOP) -> list[list[str]]:
    """Return the items with the highest scores in each row, as lists of ids."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [[f"i{item}" for item in row] for row in order.tolist()]


def unit(rows: Floats) -> Floats:
    """Return the rows divided by their lengths."""
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def asking(url: str) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that looks up entities of a table of the service."""

    def look_up(table: str, *entities: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"k": TOP, "entities": list(entities)}
        answers = httpx.post(f"{url}/v1/lookup/{table}", json=body, timeout=30).json()["answers"]
        return list(answers)

    return look_up
