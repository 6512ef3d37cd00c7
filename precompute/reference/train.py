"""Training the reference bundle from interactions: its shape chosen, its towers and affinities written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import ConfigError, SourceError
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles import graphs
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_writer import ModelFile, write_bundle
from precompute.config.progress import Progress, quiet
from precompute.reference.affinity import affinities
from precompute.reference.choice import ShapeChoice, choose
from precompute.reference.shapes import Shape, tables_of
from precompute.reference.spectral import UserItemMatrix, matrix_of

AFFINITY_SHARPNESS = 8.0
HISTORY_MAX = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceData:
    """Interactions as pairs of rows (int64 [n] each); `categories` has one name per item, `times` int64 [n], if known.

    Texts may be Arrow strings: of a large catalogue a Python object each would take more than all else.
    """

    user_rows: NDArray[np.int64]
    item_rows: NDArray[np.int64]
    item_ids: Sequence[str] | pa.Array
    categories: Sequence[str] | pa.Array | None = None
    times: NDArray[np.int64] | None = None


def train(
    data: ReferenceData,
    bundle_folder: Path,
    *,
    dims: int = 256,
    seed: int = 0,
    programs: bool = False,
    shape: Shape | None = None,
    progress: Progress = quiet,
) -> Bundle:
    """Train and write a bundle; the same data and seed give the same bytes on the same machine.

    The shape is chosen (see `choice`) unless it is given; `dims` is the most that a vector may have, and shrinks to the
    smaller side of the matrix. Repeated interactions count once. `programs` writes each model as a torch.export
    program too; raises ConfigError where torch is not installed.
    """
    if not len(data.user_rows):
        raise SourceError("there are no interactions to train on")
    users, items = int(data.user_rows.max()) + 1, len(data.item_ids)
    dims = min(dims, users, items)
    rng, of_choice = np.random.default_rng(seed).spawn(2)
    choice = (
        choose(
            data.user_rows,
            data.item_rows,
            items,
            dims,
            of_choice,
            times=data.times,
            progress=progress,
        )
        if shape is None
        else ShapeChoice(replace(shape, dims=dims))
    )
    matrix = matrix_of(data.user_rows, data.item_rows, (users, items))
    user_item_matrix = UserItemMatrix.of(matrix)
    [(_, (history_rows, item_vectors))] = tables_of(user_item_matrix, [choice.shape], rng)
    dims = choice.shape.dims
    centroids, labels = affinities(
        item_vectors, user_item_matrix.item_degrees, data.item_ids, data.categories, rng
    )
    history = InputSpec("history", "history", "int32", max_length=HISTORY_MAX, pad=items)
    sharpened = centroids * np.float32(AFFINITY_SHARPNESS)
    padded = np.concatenate([history_rows, np.zeros((1, dims), np.float32)])
    carried = _programs(padded, item_vectors, sharpened) if programs else {}
    return write_bundle(
        bundle_folder,
        name=f"reference-{choice.method}",
        version=f"1-seed{seed}",
        dims=dims,
        item_ids=data.item_ids,
        user_tower=ModelFile(
            graphs.history_tower(padded),
            TowerSpec((history,), "vector", dims),
            program=carried.get("user_tower"),
        ),
        item_tower=ModelFile(
            graphs.item_tower(item_vectors),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", dims),
            entity="item",
            program=carried.get("item_tower"),
        ),
        values={
            "user_affinity": ModelFile(
                graphs.affinity_model(padded, sharpened),
                TowerSpec((history,), "probabilities", len(labels)),
                labels=labels,
                program=carried.get("user_affinity"),
            )
        },
        training={
            "users": users,
            "items": items,
            "interactions": int(matrix.nnz),
            "seed": seed,
            **({} if data.times is None else {"trained_until": _iso(int(data.times.max()))}),
            **choice.row(),
        },
    )


def _iso(microseconds: int) -> str:
    """Time of the newest interaction that was learnt from, in UTC."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)).isoformat()


def _programs(
    padded: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    sharpened: NDArray[np.float32],
) -> Mapping[str, bytes]:
    try:
        from precompute.bundles import exports
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reference.programs needs torch: install the extra `gpu`, or set it to false",
            field="programs",
        ) from error
    return {
        "user_tower": exports.history_tower(padded),
        "item_tower": exports.item_tower(item_vectors),
        "user_affinity": exports.affinity_model(padded, sharpened),
    }
