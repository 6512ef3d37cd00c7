"""The reference model: a closed-form spectral two-tower, trained without gradients or torch.

With R the 0/1 user-item matrix and D its item degrees, V holds the top right singular vectors of
D_u^-1/2 R D^-b. A user is the sum of D^-b V s^g over the history, an item is D^b V: the row is
normalised, projected onto the subspace (damped by s^g) and brought back (PureSVD, Cremonesi et al.,
RecSys 2010, with the degree normalisation of GF-CF, Shen et al., CIKM 2021). One linear layer over
the history, so any user folds in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.errors import ConfigError, SourceError
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles import graphs
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_writer import ModelFile, write_bundle
from precompute.bundles.index import unit
from precompute.sources.columns import strings_of

ITEM_EXPONENT = 0.4
SPECTRUM_EXPONENT = 0.25
CLUSTERS = 16
AFFINITY_SHARPNESS = 8.0
HISTORY_MAX = 1024
FILE_BYTES_MAX = 2**31 - 2**20
"""Maximum bytes of a model's weights: Protocol Buffers end at 2 GiB, and the graph wants some."""

_POWER_ITERATIONS = 4
_OVERSAMPLE = 64
_CLUSTER_ROUNDS = 20


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceData:
    """Interactions as pairs of rows (int64 [n] each); `categories` has one name per item, if known.

    Texts may be Arrow strings: of a large catalogue a Python object each would take more than all else.
    """

    user_rows: NDArray[np.int64]
    item_rows: NDArray[np.int64]
    item_ids: Sequence[str] | pa.Array
    categories: Sequence[str] | pa.Array | None = None


def train(
    data: ReferenceData, out: Path, *, dims: int = 256, seed: int = 0, programs: bool = False
) -> Bundle:
    """Train and write a bundle; the same data and seed give the same bytes on the same machine.

    Dimensions shrink to the smaller side of the matrix. Repeated interactions count once. `programs` writes each model
    as a torch.export program too; raises ConfigError where torch is not installed.
    """
    matrix = _matrix(data)
    users, items = matrix.shape
    dims = min(dims, users, items)
    _demand_room(items, dims)
    rng = np.random.default_rng(seed)
    degrees = np.asarray(matrix.sum(axis=0)).ravel()
    factors, spectrum = singular_vectors(_normalised(matrix, degrees), dims, rng)
    damped = (spectrum / max(float(spectrum[0]), 1e-30)) ** SPECTRUM_EXPONENT
    history_rows = (_power(degrees, -ITEM_EXPONENT)[:, None] * factors * damped).astype(np.float32)
    item_vectors = (_power(degrees, ITEM_EXPONENT)[:, None] * factors).astype(np.float32)
    centroids, labels = _affinities(item_vectors, degrees, data, rng)
    history = InputSpec("history", "history", "int32", max_length=HISTORY_MAX, pad=items)
    sharpened = centroids * np.float32(AFFINITY_SHARPNESS)
    padded = np.concatenate([history_rows, np.zeros((1, dims), np.float32)])
    carried = _programs(padded, item_vectors, sharpened) if programs else {}
    return write_bundle(
        out,
        name="reference-spectral",
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
            "method": "spectral",
            "users": users,
            "items": items,
            "interactions": int(matrix.nnz),
            "dims": dims,
            "seed": seed,
            "item_exponent": ITEM_EXPONENT,
            "spectrum_exponent": SPECTRUM_EXPONENT,
        },
    )


def _demand_room(items: int, dims: int) -> None:
    """Raises ConfigError, before anything is computed, for a table that no model file can hold."""
    most = FILE_BYTES_MAX // (4 * (items + 1))
    if dims > most:
        raise ConfigError(
            f"{items:,} items of {dims} dimensions do not fit into an ONNX file, which holds 2 GiB: set "
            f"reference.dims to {most} at most",
            field="dims",
        )


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


def singular_vectors(
    matrix: sp.csr_matrix, dims: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(V [items, dims], s [dims]) by randomised subspace iteration (Halko et al., 2011); signs fixed.

    Small matrices are decomposed exactly.
    """
    users, items = matrix.shape
    wanted = min(dims + _OVERSAMPLE, users, items)
    if min(users, items) <= wanted:
        _, spectrum, rows = np.linalg.svd(matrix.toarray(), full_matrices=False)
        factors = rows.T
    else:
        back = matrix.T.tocsr()
        basis = matrix @ rng.standard_normal((items, wanted), np.float32)
        for _ in range(_POWER_ITERATIONS):
            basis = matrix @ np.linalg.qr(back @ np.linalg.qr(basis)[0])[0]
        # back @ Q is tall: its QR leaves a small square matrix to decompose.
        tall, small = np.linalg.qr(back @ np.linalg.qr(basis)[0])
        left, spectrum, _ = np.linalg.svd(small)
        factors = tall @ left
    factors, spectrum = factors[:, :dims].astype(np.float64), spectrum[:dims].astype(np.float64)
    largest = np.abs(factors).argmax(axis=0)
    return factors * np.sign(factors[largest, np.arange(dims)]), spectrum


def spherical_clusters(
    directions: NDArray[np.float32], clusters: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Cluster of each unit vector by spherical k-means (Dhillon and Modha, 2001)."""
    centres = directions[rng.choice(len(directions), clusters, replace=False)]
    assigned = np.zeros(len(directions), np.int64)
    for _ in range(_CLUSTER_ROUNDS):
        nearest = (directions @ centres.T).argmax(axis=1)
        if np.array_equal(nearest, assigned):
            break
        assigned = nearest
        centres = _centroids(directions, assigned, clusters, centres)
    return assigned


def _matrix(data: ReferenceData) -> sp.csr_matrix:
    if not len(data.user_rows):
        raise SourceError("there are no interactions to train on")
    shape = (int(data.user_rows.max()) + 1, len(data.item_ids))
    ones = np.ones(len(data.user_rows), np.float32)
    matrix = sp.csr_matrix((ones, (data.user_rows, data.item_rows)), shape=shape)
    matrix.data[:] = 1
    return matrix


def _normalised(matrix: sp.csr_matrix, degrees: NDArray[np.float32]) -> sp.csr_matrix:
    users = _power(np.asarray(matrix.sum(axis=1)).ravel(), -0.5)
    scaled = sp.diags(users) @ matrix @ sp.diags(_power(degrees, -ITEM_EXPONENT))
    return scaled.tocsr().astype(np.float32)


def _power(degrees: NDArray[np.float32], exponent: float) -> NDArray[np.float64]:
    wide = degrees.astype(np.float64)
    return np.power(wide, exponent, out=np.zeros_like(wide), where=wide > 0)


def _affinities(
    vectors: NDArray[np.float32],
    degrees: NDArray[np.float32],
    data: ReferenceData,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Unit centroids [n, dims] and their labels: the given categories, or clusters named by their top item."""
    directions = unit(vectors)
    if data.categories is not None:
        coded = pc.dictionary_encode(strings_of(data.categories))
        names, places = np.unique(
            coded.dictionary.to_numpy(zero_copy_only=False).astype(str), return_inverse=True
        )
        groups = places[np.asarray(coded.indices)]
        blank = np.zeros((len(names), vectors.shape[1]), np.float32)
        return _centroids(directions, groups, len(names), blank), tuple(str(each) for each in names)
    wanted = min(CLUSTERS, len(vectors))
    groups = spherical_clusters(directions, wanted, rng)
    used = np.unique(groups)
    order = np.lexsort((np.arange(len(degrees)), -degrees))
    labels = [str(data.item_ids[order[groups[order] == each][0]]) for each in used]
    blank = np.zeros((wanted, vectors.shape[1]), np.float32)
    return _centroids(directions, groups, wanted, blank)[used], tuple(labels)


def _centroids(
    directions: NDArray[np.float32],
    groups: NDArray[np.int64],
    count: int,
    otherwise: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Unit mean of each group; an empty group keeps what it had."""
    size = len(directions)
    member = sp.csr_matrix((np.ones(size, np.float32), (groups, np.arange(size))), (count, size))
    filled = np.bincount(groups, minlength=count) > 0
    return np.where(filled[:, None], unit(member @ directions), otherwise)
