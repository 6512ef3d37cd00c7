"""Model bundle: a folder with `bundle.json`, the item ids in the model's own order, and checksummed ONNX files."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cachetools import LRUCache, cached

from cache.errors import BundleError
from cache.format.ids import ID_BYTES_MAX
from cache.format.manifest import EntityKind
from cache.formats import BUNDLE, FORMATS, unreadable_reason
from cache.model.ranking import Metric
from cache.model.tower import Tower
from cache.model.tower_spec import TowerSpec
from cache.store.artefacts import sha256_of, write_atomically
from precompute.bundles.onnx_model import WEIGHTS_BYTES_MAX, OnnxModel, demand_weights
from precompute.sources.columns import raws_of, strings_of
from precompute.sources.vocabulary import Vocabulary, as_strings

BUNDLE_FILE = "bundle.json"
ITEMS_FILE = "items.parquet"

COLUMNS_OF_INPUTS = "columns"
"""Entry of a bundle's `training`: by feature column, the columns of the table that it was made of, in their order."""

FileStamp = tuple[int, int, int, int, int]
"""Device, inode, size and times of a file: see `sha256_unchanged`."""

SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change from which on a further change surely gets another time stamp (clock ticks)."""

DIGESTS_KEPT = 256
"""Number of files whose digests a process remembers."""

_digest_by_stamp: LRUCache[FileStamp, str] = LRUCache(DIGESTS_KEPT)


@dataclass(frozen=True, slots=True)
class BundleModel:
    """ONNX file of a bundle with its inputs and outputs; `labels` only for a value model.

    `weights` is a second file with the weights that do not fit the first, and `program` the same model as a
    `torch.export` program, if the bundle has them. Checksums are those that `bundle.json` lists: call `demand_sha256`
    before opening a file.
    """

    name: str
    path: Path
    sha256: str
    entity: EntityKind
    spec: TowerSpec
    labels: tuple[str, ...] = ()
    program: Path | None = None
    program_sha256: str = ""
    weights: Path | None = None
    weights_sha256: str = ""

    @property
    def files(self) -> tuple[tuple[Path, str, str], ...]:
        """Tuples of (file, name in a generation, SHA-256) of the ONNX file, and of the weights file if there is one."""
        file_entries = [(self.path, f"models/{self.name}.fp32.onnx", self.sha256)]
        if self.weights is not None:
            file_entries.append((self.weights, f"models/{self.weights.name}", self.weights_sha256))
        return tuple(file_entries)

    @property
    def digest(self) -> str:
        """SHA-256 of the model: of its ONNX file, or of both checksums if it has a weights file."""
        if self.weights is None:
            return self.sha256
        return hashlib.sha256(f"{self.sha256}|{self.weights_sha256}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ItemsFile:
    """File of the item ids, as `bundle.json` lists it."""

    path: Path
    sha256: str
    count: int


@dataclass(frozen=True, eq=False)
class Bundle:
    """Bundle; row r of its `vocabulary` is the item with the model index r."""

    path: Path
    name: str
    version: str
    digest: str
    dims: int
    metric: Metric
    items: ItemsFile
    user_tower: BundleModel
    item_tower: BundleModel
    values: Mapping[str, BundleModel]
    training: Mapping[str, Any]

    @property
    def needs_history(self) -> bool:
        """True if no model answers for a user without a history."""
        return all(
            model.spec.history is not None for model in self.models if model.entity == "user"
        )

    @property
    def answers_without_history(self) -> bool:
        """True if a user model takes features in addition to a history, so that it answers from features alone."""
        return any(
            model.entity == "user" and model.spec.history is not None and bool(model.spec.features)
            for model in self.models
        )

    @classmethod
    def open(cls, path: Path) -> Self:
        """Verify checksums, then try the models; raise BundleError naming both sides of any mismatch."""
        bundle = cls.read(path)
        bundle.verify()
        bundle.try_models()
        return bundle

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the bundle's description (`bundle.json`), but neither its items nor the models' files."""
        try:
            raw = (path / BUNDLE_FILE).read_bytes()
            data = orjson.loads(raw)
        except (OSError, orjson.JSONDecodeError) as error:
            raise BundleError(f"{path} holds no readable {BUNDLE_FILE}: {error}") from error
        if (reason := unreadable_reason(BUNDLE, data.get("format"), BUNDLE_FILE)) is not None:
            raise BundleError(reason)
        try:
            dims, metric = int(data["dims"]), data["metric"]
            model_entries = [
                ("user_tower", "user", data["user_tower"]),
                ("item_tower", "item", data["item_tower"]),
                *(
                    (name, value_entry["entity"], value_entry)
                    for name, value_entry in sorted(data.get("values", {}).items())
                ),
            ]
            user, item, *value_models = models = [
                _model(path, *model_entry) for model_entry in model_entries
            ]
            _demand_own_names(models)
            listed_items = data["items"]
            items = ItemsFile(
                _file(path, listed_items), str(listed_items["sha256"]), int(listed_items["count"])
            )
            name, version = str(data["name"]), str(data["version"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"{BUNDLE_FILE} lacks or misuses {error}") from error
        if metric not in ("inner_product", "cosine"):
            raise BundleError(
                f"{BUNDLE_FILE} says metric {metric!r}; it is inner_product or cosine"
            )
        for tower in (user, item):
            if tower.spec.output_dims != dims:
                raise BundleError(
                    f"{tower.name} gives {tower.spec.output_dims} dimensions, {BUNDLE_FILE} says {dims}",
                    dims=dims,
                )
        digest = hashlib.sha256(raw).hexdigest()
        return cls(
            path, name, version, digest, dims, metric, items,
            user, item, {model.name: model for model in value_models}, data.get("training", {}),
        )  # fmt: skip

    def verify(self) -> None:
        """Raise BundleError for a file that differs from its checksum, or items that are no ids."""
        _ = self.vocabulary
        with ThreadPoolExecutor() as pool:  # each is the size of the catalogue, and read whole
            list(pool.map(_verify_model, self.models))

    def try_models(self, path_of: Callable[[BundleModel], Path] = lambda model: model.path) -> None:
        """Open each model's file, or a copy, once; raise BundleError if it differs from the bundle's description."""

        def check(model: BundleModel) -> None:
            _check_model(model, path_of(model), self.items.count)

        with ThreadPoolExecutor() as pool:
            list(pool.map(check, self.models))

    @property
    def models(self) -> tuple[BundleModel, ...]:
        """Towers and value models."""
        return (self.user_tower, self.item_tower, *self.values.values())

    @property
    def has_weights(self) -> bool:
        """True if a model has a weights file, which a manifest of format 1 cannot list."""
        return any(model.weights is not None for model in self.models)

    @property
    def columns_of_lists(self) -> Mapping[str, Sequence[str]]:
        """Columns by the feature column that is made of them; a table may have them in its place."""
        columns: Mapping[str, Sequence[str]] = self.training.get(COLUMNS_OF_INPUTS, {})
        return columns

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Item ids in the model's own order, read at first use."""
        return _read_items(self.items)

    @cached_property
    def item_ids(self) -> tuple[bytes, ...]:
        """Vocabulary as Python objects, for small catalogues."""
        return tuple(raws_of(self.vocabulary.texts))

    @property
    def vocabulary_digest(self) -> str:
        """SHA-256 over the item ids in the model's own order, each with its length."""
        hasher = hashlib.sha256()
        for chunk in self.vocabulary.texts.chunks:
            raws = raws_of(chunk)
            hasher.update(b"".join([len(raw).to_bytes(2, "little") + raw for raw in raws]))
        return hasher.hexdigest()


def _model(
    path: Path, name: str, entity: Literal["user", "item"], model_entry: Mapping[str, Any]
) -> BundleModel:
    if entity not in ("user", "item"):
        raise BundleError(f"{name} is for the entity {entity!r}; it is user or item", model=name)
    spec = TowerSpec.from_json(model_entry)
    labels = tuple(str(label) for label in model_entry.get("labels", ()))
    if labels and len(labels) != spec.output_dims:
        raise BundleError(
            f"{name} gives {spec.output_dims} numbers, {BUNDLE_FILE} has {len(labels)} labels for them",
            model=name,
        )
    program, weights = model_entry.get("program"), model_entry.get("weights")
    file = _file(path, model_entry)
    return BundleModel(
        name, file, str(model_entry["sha256"]), entity, spec, labels,
        _file(path, program) if program else None,
        str(program["sha256"]) if program else "",
        _weights(path, name, file, weights) if weights else None,
        str(weights["sha256"]) if weights else "",
    )  # fmt: skip


def _weights(path: Path, name: str, file: Path, data: Mapping[str, Any]) -> Path:
    """Return a model's weights file, which ONNX Runtime needs in the folder of the model; raise BundleError."""
    weights = _file(path, data)
    if weights.parent != file.parent:
        raise BundleError(
            f"{name} has its weights in {data['path']}: they belong beside {file.name}"
        )
    if (size_bytes := weights.stat().st_size) > WEIGHTS_BYTES_MAX:
        raise BundleError(
            f"{weights.name} has {size_bytes:,} bytes, {WEIGHTS_BYTES_MAX:,} at most: use fewer dimensions"
        )
    return weights


def _file(path: Path, data: Mapping[str, Any]) -> Path:
    folder = path.resolve()
    file = (folder / str(data["path"])).resolve()
    if not file.is_relative_to(folder):
        raise BundleError(f"{BUNDLE_FILE} names {data['path']}, which lies outside the bundle")
    if not file.is_file():
        raise BundleError(
            f"{BUNDLE_FILE} names {data['path']}, which is missing", path=str(data["path"])
        )
    return file


def _demand_own_names(models: Sequence[BundleModel]) -> None:
    """Raise BundleError for two files with the same name in a generation, which has all models in one folder."""
    sha256_by_name: dict[str, str] = {}
    for _, name, sha256 in (file for model in models for file in model.files):
        if sha256_by_name.setdefault(name, sha256) != sha256:
            raise BundleError(f"two files would be {name} of a generation: rename the weights")


def _read_items(items: ItemsFile) -> Vocabulary:
    demand_sha256(items.path, items.sha256)
    table, name = pq.read_table(items.path), items.path.name
    if table.column_names != ["id"] or not (
        pa.types.is_string(table.schema.field("id").type)
        or pa.types.is_large_string(table.schema.field("id").type)
    ):
        raise BundleError(f"{name} holds {table.schema}, not one string column `id`")
    column = table.column("id")
    try:
        column.validate(full=True)  # of UTF-8, too
    except pa.ArrowInvalid as error:
        raise BundleError(f"{name}: {error}; ids are UTF-8") from error
    sizes = pc.min_max(pc.binary_length(column)).as_py()
    fits = not len(column) or ((sizes["min"] or 0) >= 1 and sizes["max"] <= ID_BYTES_MAX)
    if column.null_count or not fits:
        raise BundleError(
            f"{name}: {column.null_count} ids are missing, the others have {sizes['min']} to "
            f"{sizes['max']}: ids have 1 to {ID_BYTES_MAX} bytes"
        )
    if (count := len(column)) != items.count:
        raise BundleError(
            f"{name} holds {count} items, {BUNDLE_FILE} says {items.count}", count=count
        )
    vocabulary = Vocabulary.of(as_strings(column))
    if vocabulary is None:
        raise BundleError(f"{name} names an item twice")
    return vocabulary


def _verify_model(model: BundleModel) -> None:
    for path, _, sha256 in model.files:
        demand_sha256(path, sha256)
    if model.program is not None:
        demand_sha256(model.program, model.program_sha256)


def _check_model(model: BundleModel, path: Path, items: int) -> None:
    """Open the model once; refuse weights that are not listed, and a padding index that is one of the items."""
    demand_weights(model.name, path, model.weights)
    try:
        Tower.open(path, model.spec)
    except BundleError:
        if path != model.path:
            Tower.open(
                model.path, model.spec
            )  # what is wrong with the model is told under its own name
        raise
    history = model.spec.history
    if history is not None and history.pad is not None and 0 <= history.pad < items:
        raise BundleError(
            f"{model.name} pads with {history.pad}, which is one of the {items} items",
            model=model.name,
        )


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Model to be written into a bundle: ONNX, its specification, and a torch.export archive if any."""

    onnx: OnnxModel
    spec: TowerSpec
    entity: EntityKind = "user"
    labels: tuple[str, ...] = ()
    program: bytes | None = None


def write_bundle(
    path: Path,
    *,
    name: str,
    version: str,
    dims: int,
    item_ids: Sequence[str] | pa.Array,
    user_tower: ModelFile,
    item_tower: ModelFile,
    values: Mapping[str, ModelFile] | None = None,
    metric: Metric = "inner_product",
    training: Mapping[str, Any] | None = None,
) -> Bundle:
    """Write a bundle (`bundle.json` last, so that half a bundle never opens) and open it; ids may be Arrow strings."""
    path.mkdir(parents=True, exist_ok=True)
    (path / BUNDLE_FILE).unlink(missing_ok=True)
    pq.write_table(pa.table({"id": strings_of(item_ids)}), path / ITEMS_FILE)
    data: dict[str, Any] = {
        "format": FORMATS[BUNDLE].written,
        "name": name,
        "version": version,
        "dims": dims,
        "metric": metric,
        "items": {
            "path": ITEMS_FILE,
            "count": len(item_ids),
            "sha256": sha256_of(path / ITEMS_FILE),
        },
        "user_tower": _write_model(path, "user_tower", user_tower),
        "item_tower": _write_model(path, "item_tower", item_tower),
        "values": {
            key: {
                "entity": model.entity,
                "labels": list(model.labels),
                **_write_model(path, key, model),
            }
            for key, model in (values or {}).items()
        },
        "training": dict(training or {}),
    }
    write_atomically(path / BUNDLE_FILE, orjson.dumps(data, option=orjson.OPT_INDENT_2))
    return Bundle.open(path)


def _write_model(path: Path, name: str, model: ModelFile) -> dict[str, Any]:
    file = path / f"{name}.onnx"
    weights = model.onnx.write(file)
    written = {"path": file.name, "sha256": sha256_of(file), **model.spec.to_json()}
    if weights is not None:
        written["weights"] = {"path": weights.name, "sha256": sha256_of(weights)}
    if model.program is not None:
        program_path = path / f"{name}.pt2"
        write_atomically(program_path, model.program)
        written["program"] = {"path": program_path.name, "sha256": sha256_of(program_path)}
    return written


def demand_sha256(path: Path, expected_sha256: str) -> None:
    """Raise BundleError for a file of a bundle that differs from its checksum in `bundle.json`."""
    if (actual_sha256 := sha256_unchanged(path)) != expected_sha256:
        raise BundleError(
            f"{path.name} has SHA-256 {actual_sha256}, bundle.json says {expected_sha256}",
            path=path.name,
        )


def sha256_unchanged(path: Path) -> str:
    """Return the SHA-256 of a file; one already hashed by this process and unchanged since is not read again.

    Device, inode, size, time of modification and of the last change of the inode identify the version. The latter is
    the kernel's: writing to a file or putting another in its place changes it, whatever times a program sets.
    """
    file_stat = path.stat()
    stamp = (
        file_stat.st_dev,
        file_stat.st_ino,
        file_stat.st_size,
        file_stat.st_mtime_ns,
        file_stat.st_ctime_ns,
    )
    is_settled = time.time_ns() - file_stat.st_ctime_ns > SETTLED_NS
    return _sha256_once(path, stamp) if is_settled else sha256_of(path)


@cached(_digest_by_stamp, key=lambda _path, stamp: stamp, lock=threading.Lock())
def _sha256_once(path: Path, _stamp: FileStamp) -> str:
    return sha256_of(path)
