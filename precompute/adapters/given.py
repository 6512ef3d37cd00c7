"""Ids, vectors and clicks as a caller has them (arrays, lists, files), checked, in the forms that a folder needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.config.sections import Sources
from cache.errors import SourceError
from cache.model.tower import Histories
from precompute.sources import unusable
from precompute.sources.columns import read_ids
from precompute.sources.csv_files import BLANKS
from precompute.sources.interactions import Numbered
from precompute.sources.readers import Interactions, read_interactions
from precompute.sources.vocabulary import Vocabulary, repeats_in

_REPEAT, _UNKNOWN, _NO_CLICK = "repeats", "of unknown users or items", "of weight 0 or less"


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """Vectors float32 [n, dims] of entities, and their ids as Arrow strings."""

    ids: Any
    rows: NDArray[np.float32]

    @classmethod
    def of(cls, ids: Any, rows: Any, what: str) -> Self:
        """Checks both; `rows` may be the path of a .npy file, or of a Parquet file with a column of ids and of vectors.

        Raises SourceError, which names what is wrong and the remedy.
        """
        if isinstance(rows, str | Path):
            named, rows = _from_file(Path(rows), what)
            ids = named if ids is None else ids
        found = _numbers(rows, what)
        texts = ids_of(range(len(found)) if ids is None else ids, what)
        if len(texts) != len(found):
            raise SourceError(
                f"{len(texts):,} {what} ids, but {len(found):,} {what} vectors: give one id for each row, in its order"
            )
        return cls(texts, found)

    @property
    def dims(self) -> int:
        """Numbers of a vector."""
        return int(self.rows.shape[1])


def ids_of(ids: Any, what: str) -> Any:
    """Arrow strings of ids (texts or integers, or the path of a file with one a line); SourceError for others."""
    if isinstance(ids, str | Path):
        path = Path(ids)
        try:
            # Only a line break ends a line: `splitlines` knows eight more signs, which ids may hold.
            lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
            ids = [line.strip(BLANKS) for line in lines]
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{what} ids {path}: {error}; it holds one id a line, in UTF-8"
            ) from None
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    try:
        column = (
            values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(list(values))
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise SourceError(
            f"{what} ids: {error}; ids are texts or integers, all of one kind"
        ) from None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not len(column):
        raise SourceError(f"there is no {what}: give at least one")
    found, bad = read_ids(column, Path("the ids given"), what)
    if bad:
        reason, rows = next(iter(bad.items()))
        raise SourceError(
            f"{what} ids: {reason}, first in row {int(rows.argmax())}{unusable.remedy(reason)}"
        )
    texts = found.texts()
    repeated = repeats_in(texts)
    if len(repeated):
        at = int(repeated[0])
        raise SourceError(
            f"{what} id {texts[at].as_py()!r} is there twice, the second time in row {at}: keep one row for each",
            row=at,
        )
    return texts


class NothingKnown(SourceError):
    """No click is of a known user on a known item."""


def _ids_remedy(users: Any, items: Any) -> str:
    """What to do where no id of the clicks is known: most often the model's rows were given no ids."""
    unnamed = [
        f"{what}_ids (--{what}-ids)"
        for what, ids in (("user", users), ("item", items))
        if ids is not None and len(ids) and ids[len(ids) - 1].as_py() == str(len(ids) - 1)
    ]
    if not unnamed:
        return "are the ids the same?"
    return f"the model's rows are called by their numbers: give {' and '.join(unnamed)}, one id a line in their order"


@dataclass(frozen=True, slots=True, eq=False)
class ClickMatrix:
    """Clicks of users on items, by the rows of both: a CSR matrix [users, items] of weights above 0.

    Those that were read from a table with times are in their order within a row (`is_ordered`). `left_out`: number of
    clicks that are not in it, by the reason in words.
    """

    matrix: sp.csr_matrix
    users: Any
    is_ordered: bool = False
    left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, users: Any, items: Any) -> Self:
        """Checks a scipy matrix [users, items] (or its .npz file), or reads a table (a path; `Sources` names columns).

        `users` are the users' ids in the order of the rows (None: the matrix' row numbers, or whoever is in the table),
        `items` Arrow strings in the order of the columns; a table's clicks on other items are left out. Raises
        SourceError, which names both sides.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str | Path) and Path(given).suffix != ".npz":
            given = Sources(interactions=(str(given),))
        if isinstance(given, Sources):
            where = ", ".join(given.interactions)
            return cls.read(read_interactions(given, Path.cwd()), where, users, items)
        if isinstance(given, str | Path):
            try:
                given = sp.load_npz(given)
            except (OSError, ValueError, KeyError) as error:
                raise SourceError(
                    f"{given}: {error}; write it with scipy.sparse.save_npz"
                ) from None
        if not sp.issparse(given):
            raise SourceError(
                f"clicks are a scipy sparse matrix, users by items, not a {type(given).__name__}"
            )
        found = sp.csr_matrix(given, dtype=np.float32, copy=True)
        texts = ids_of(range(found.shape[0]), "user") if users is None else users
        if found.shape != (len(texts), len(items)):
            is_turned = found.shape == (len(items), len(texts))
            remedy = "give a row for each user, a column for each item, in the order of their ids"
            raise SourceError(
                f"the clicks are {found.shape[0]:,} by {found.shape[1]:,}, there are {len(texts):,} users and "
                f"{len(items):,} items: {'it is items by users, give its transpose' if is_turned else remedy}"
            )
        if not np.isfinite(found.data).all():
            raise SourceError("the clicks have weights that are no finite numbers: leave those out")
        found.sum_duplicates()
        found.data[found.data < 0] = 0  # a dislike, which no history can say
        left_out = {_NO_CLICK: int(found.nnz - found.count_nonzero())}
        found.eliminate_zeros()
        return cls(found, texts, left_out=left_out)

    @classmethod
    def read(cls, batches: Iterable[Interactions], where: str, users: Any, items: Any) -> Self:
        """Clicks as a night reads them; those of users (None: everybody is) and items that are not known are left out.

        Raises NothingKnown where that leaves none, naming `where` they came from.
        """
        columns, numbered = Vocabulary.of(pa.chunked_array([items])), Numbered()
        rows: list[NDArray[np.int64]] = []
        times: list[NDArray[np.int64]] = []
        assert columns is not None  # noqa: S101 - ids were checked
        for batch in batches:
            numbered.add(batch.users)
            rows.append(columns.places(batch.items.names)[batch.items.codes])
            times.append(batch.times)
        row, column, time = numbered.codes(), np.concatenate(rows), np.concatenate(times)
        names = numbered.names.cast(pa.string())
        if users is not None:
            known = Vocabulary.of(pa.chunked_array([users]))
            assert known is not None  # noqa: S101
            row, names = known.places(names)[row], users
        kept = (row >= 0) & (column >= 0)
        if not kept.any():
            raise NothingKnown(
                f"{where}: not one click is of a known user on a known item; {_ids_remedy(users, items)}"
            )
        found = cls.in_order(row[kept], column[kept], time[kept], names, len(items))
        return replace(found, left_out={**found.left_out, _UNKNOWN: int((~kept).sum())})

    @classmethod
    def in_order(
        cls, row: NDArray[np.int64], column: NDArray[np.int64], time: NDArray[Any], users: Any, items: int
    ) -> Self:  # fmt: skip
        """Clicks in the order of their times, of each pair the latest; `users` are Arrow strings."""
        order = np.lexsort((time, row))[::-1]
        pairs = row[order] * items + column[order]
        latest = order[np.sort(np.unique(pairs, return_index=True)[1])][::-1]
        indptr = np.searchsorted(row[latest], np.arange(len(users) + 1))
        ones = np.ones(len(latest), np.float32)
        matrix = sp.csr_matrix((ones, column[latest], indptr), (len(users), items))
        return cls(matrix, users, bool(time.any()), {_REPEAT: len(row) - len(latest)})

    @property
    def usual_weight(self) -> float:
        """Median weight of a click; 1 without any."""
        return float(np.median(self.matrix.data)) if self.matrix.nnz else 1.0

    @property
    def is_weighted(self) -> bool:
        """True if clicks weigh differently."""
        return bool(self.matrix.nnz) and self.matrix.data.min() != self.matrix.data.max()

    def sample(self, most: int, least: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Rows of at most `most` users with at least `least` items, in ascending order."""
        enough = np.flatnonzero(np.diff(self.matrix.indptr) >= least)
        return np.sort(rng.choice(enough, min(most, len(enough)), replace=False))

    def histories(self, rows: NDArray[np.int64], longest: int) -> Histories:
        """Items of some users, the last `longest` of each."""
        found = Histories(self.matrix.indptr.astype(np.int64), self.matrix.indices.astype(np.int64))
        parts = [
            found.indices[found.indptr[row] : found.indptr[row + 1]][-longest:] for row in rows
        ]
        return Histories.of(parts)

    def write(self, path: Path, items: Any) -> None:
        """Writes a Parquet file with a row for each click: the columns `user` and `item`."""
        schema = pa.schema([("user", pa.string()), ("item", pa.string())])
        with pq.ParquetWriter(path, schema) as file:
            step = 100_000
            for start in range(0, self.matrix.shape[0], step):
                part = self.matrix[start : start + step].tocoo()
                order = np.argsort(part.row, kind="stable")
                users = self.users.take(pa.array(part.row[order] + start))
                file.write_table(
                    pa.table([users, items.take(pa.array(part.col[order]))], schema=schema)
                )


def _from_file(path: Path, what: str) -> tuple[Any, Any]:
    """(ids if the file has them, rows)."""
    try:
        if path.suffix == ".npy":
            return None, np.load(path, allow_pickle=False)
        if path.suffix != ".parquet":
            raise SourceError(f"{what} vectors {path}: a .npy or a .parquet file is read")
        known = pq.read_schema(path).names
        if len(set(known)) < len(known):
            raise SourceError(
                f"{what} vectors {path} has two columns of one name among {', '.join(known)}: leave one"
            )
        table = pq.read_table(path)
    except FileNotFoundError:
        raise SourceError(f"{what} vectors: there is no file {path}") from None
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        if "pickle" in str(error).lower():  # numpy says how it would be read all the same
            raise SourceError(
                f"{what} vectors {path} are pickled, and would run whatever code is in them: save numbers, not objects"
            ) from None
        raise SourceError(f"{what} vectors {path}: {error}") from None
    names = [each.name for each in table.schema if _is_list(each.type)]
    others = [name for name in table.column_names if name not in names]
    if len(names) != 1 or len(others) > 1:
        raise SourceError(
            f"{what} vectors {path} has {', '.join(table.column_names)}: it wants one of ids and one of "
            "lists of numbers"
        )
    ids = table.column(others[0]) if others else None
    return ids, table.column(names[0])


def _is_list(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(each(kind) for each in lists)


def _numbers(rows: Any, what: str) -> NDArray[np.float32]:
    if isinstance(rows, pa.Array | pa.ChunkedArray):
        if isinstance(rows, pa.ChunkedArray):
            rows = rows.combine_chunks()
        if not _is_list(rows.type):
            raise SourceError(f"{what} vectors are {rows.type}: lists of numbers are needed")
        widths = pc.list_value_length(rows).unique().to_pylist()
        if len(widths) > 1 or None in widths:
            raise SourceError(
                f"{what} vectors have {widths} numbers: all rows need as many, and none may be missing"
            )
        values = pc.list_flatten(rows)
        if values.null_count:
            row = int(np.flatnonzero(np.asarray(values.is_null()))[0]) // widths[0]
            raise SourceError(
                f"a number is missing in {what} vectors, first in row {row:,}: all numbers of a vector are needed",
                row=row,
            )
        flat = values.to_numpy(zero_copy_only=False)
        rows = flat.reshape(len(rows), -1)
    if hasattr(rows, "detach"):  # a tensor of torch
        rows = rows.detach().cpu().numpy()
    try:
        found = np.asarray(rows)
    except ValueError as error:
        raise SourceError(f"{what} vectors: {error}; all rows need as many numbers") from None
    if found.dtype == object or found.ndim != 2 or 0 in found.shape:
        raise SourceError(
            f"{what} vectors are a matrix of numbers, a row for each {what}, not {found.dtype} {list(found.shape)}"
        )
    if found.dtype == np.float16:
        raise SourceError(
            f"{what} vectors are float16, whose rounding lists would show: give the float32 that they were fitted in"
        )
    if not np.issubdtype(found.dtype, np.number) or np.iscomplexobj(found):
        raise SourceError(f"{what} vectors are {found.dtype}: real numbers are needed")
    with np.errstate(
        over="ignore"
    ):  # what float32 cannot hold becomes infinite, and is refused as that
        found = np.ascontiguousarray(found, np.float32)
    finite = np.isfinite(found).all(axis=1)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise SourceError(
            f"{len(bad):,} {what} vectors are not finite (NaN or infinite), the first in row {bad[0]:,}: fit the model "
            "to its end, or leave these rows and their ids out",
            row=int(bad[0]),
        )
    return found
