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
from precompute.sources.columns import to_arrow_strings, to_raw_ids
from precompute.sources.vocabulary import Vocabulary, to_string_chunks

BUNDLE_FILE = "bundle.json"
ITEMS_FILE = "items.parquet"

COLUMNS_OF_INPUTS_KEY = "columns"
"""Entry of a bundle's `training`: for each feature column, the columns of the table that it was made of, in order."""

FileStamp = tuple[int, int, int, int, int]
"""Device, inode, size and times of a file, as `sha256_of_unchanged` compares them."""

SETTLED_AFTER_NS = 2_000_000_000
"""Nanoseconds after a change from which on a further change is sure to get another time stamp (ticks of the clock)."""

REMEMBERED_DIGESTS_MAX = 256
"""Maximum number of files whose digests a process remembers."""

_digest_by_stamp: LRUCache[FileStamp, str] = LRUCache(REMEMBERED_DIGESTS_MAX)


@dataclass(frozen=True, slots=True)
class BundleModel:
    """ONNX file of a bundle with its inputs and outputs; `labels` only for a value model.

    `weights_path` is a second file with the weights that do not fit the first, and `program_path` the same model as a
    `torch.export` program, if the bundle has them. Checksums are those that `bundle.json` lists: call `demand_sha256`
    before opening a file.
    """

    name: str
    path: Path
    sha256: str
    entity: EntityKind
    spec: TowerSpec
    labels: tuple[str, ...] = ()
    program_path: Path | None = None
    program_sha256: str = ""
    weights_path: Path | None = None
    weights_sha256: str = ""

    @property
    def files(self) -> tuple[tuple[Path, str, str], ...]:
        """Tuples (file, name in a generation, SHA-256) of the ONNX file, and of the weights file if there is one."""
        file_entries = [(self.path, f"models/{self.name}.fp32.onnx", self.sha256)]
        if self.weights_path is not None:
            file_entries.append((self.weights_path, f"models/{self.weights_path.name}", self.weights_sha256))
        return tuple(file_entries)

    @property
    def digest(self) -> str:
        """SHA-256 of the model: of its ONNX file, or of both checksums if it has a weights file."""
        if self.weights_path is None:
            return self.sha256
        return hashlib.sha256(f"{self.sha256}|{self.weights_sha256}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ItemsFile:
    """File of the item ids, as `bundle.json` lists it."""

    path: Path
    sha256: str
    item_count: int


@dataclass(frozen=True, eq=False)
class Bundle:
    """Model bundle; row r of its `vocabulary` is the item with the model index r."""

    path: Path
    name: str
    version: str
    digest: str
    dims: int
    metric: Metric
    items: ItemsFile
    user_tower: BundleModel
    item_tower: BundleModel
    value_models: Mapping[str, BundleModel]
    training: Mapping[str, Any]

    @property
    def needs_history(self) -> bool:
        """True if no model answers for users without a history."""
        return all(model.spec.history is not None for model in self.models if model.entity == "user")

    @property
    def answers_without_history(self) -> bool:
        """True if a user model takes features in addition to a history: it then also answers from features alone."""
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
        """Read the bundle's description (`bundle.json`), but not its items or its models' files."""
        try:
            description_bytes = (path / BUNDLE_FILE).read_bytes()
            description = orjson.loads(description_bytes)
        except (OSError, orjson.JSONDecodeError) as error:
            raise BundleError(f"{path} holds no readable {BUNDLE_FILE}: {error}") from error
        if not isinstance(description, dict):
            raise BundleError(f"{path} holds no readable {BUNDLE_FILE}: it must be a JSON object")
        if (reason := unreadable_reason(BUNDLE, description.get("format"), BUNDLE_FILE)) is not None:
            raise BundleError(reason)
        try:
            dims, metric = int(description["dims"]), description["metric"]
            model_entries = [
                ("user_tower", "user", description["user_tower"]),
                ("item_tower", "item", description["item_tower"]),
                *(
                    (name, value_entry["entity"], value_entry)
                    for name, value_entry in sorted(description.get("values", {}).items())
                ),
            ]
            user_tower, item_tower, *value_models = models = [
                _parse_model(path, *model_entry) for model_entry in model_entries
            ]
            _demand_distinct_names(models)
            listed_items = description["items"]
            items = ItemsFile(_listed_file(path, listed_items), str(listed_items["sha256"]), int(listed_items["count"]))
            name, version = str(description["name"]), str(description["version"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"{BUNDLE_FILE} lacks a field, or has an invalid one: {error}") from error
        if metric not in ("inner_product", "cosine"):
            raise BundleError(f"{BUNDLE_FILE} has the metric {metric!r}; it must be inner_product or cosine")
        for tower in (user_tower, item_tower):
            if tower.spec.output_dims != dims:
                raise BundleError(
                    f"{tower.name} gives {tower.spec.output_dims} dimensions, {BUNDLE_FILE} states {dims}", dims=dims
                )
        digest = hashlib.sha256(description_bytes).hexdigest()
        return cls(
            path, name, version, digest, dims, metric, items,
            user_tower, item_tower, {model.name: model for model in value_models}, description.get("training", {}),
        )  # fmt: skip

    def verify(self) -> None:
        """Raise BundleError for a file that differs from its checksum, or for invalid item ids."""
        _ = self.vocabulary
        with ThreadPoolExecutor() as pool:  # each of these files is as large as the catalogue, and read as a whole
            list(pool.map(_verify_model, self.models))

    def try_models(self, model_path_of: Callable[[BundleModel], Path] = lambda model: model.path) -> None:
        """Open each model's file, or a copy, once; raise BundleError if it differs from the bundle's description."""

        def check_model(model: BundleModel) -> None:
            _check_model(model, model_path_of(model), self.items.item_count)

        with ThreadPoolExecutor() as pool:
            list(pool.map(check_model, self.models))

    @property
    def models(self) -> tuple[BundleModel, ...]:
        """Towers and value models."""
        return (self.user_tower, self.item_tower, *self.value_models.values())

    @property
    def has_weights(self) -> bool:
        """True if a model has a weights file, which a manifest of format 1 cannot list."""
        return any(model.weights_path is not None for model in self.models)

    @property
    def columns_of_lists(self) -> Mapping[str, Sequence[str]]:
        """Columns of a table by the feature column made of them; a table may have the feature column instead."""
        list_columns: Mapping[str, Sequence[str]] = self.training.get(COLUMNS_OF_INPUTS_KEY, {})
        return list_columns

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Item ids in the model's own order, read at first use."""
        return _read_vocabulary(self.items)

    @cached_property
    def item_ids(self) -> tuple[bytes, ...]:
        """Vocabulary as Python objects, for small catalogues."""
        return tuple(to_raw_ids(self.vocabulary.id_texts))

    @property
    def vocabulary_digest(self) -> str:
        """SHA-256 of the item ids in the model's own order, each with its length."""
        digest_hasher = hashlib.sha256()
        for id_chunk in self.vocabulary.id_texts.chunks:
            raw_ids = to_raw_ids(id_chunk)
            digest_hasher.update(b"".join([len(raw_id).to_bytes(2, "little") + raw_id for raw_id in raw_ids]))
        return digest_hasher.hexdigest()


def _parse_model(
    bundle_folder: Path, model_name: str, entity: Literal["user", "item"], model_entry: Mapping[str, Any]
) -> BundleModel:
    if entity not in ("user", "item"):
        raise BundleError(f"{model_name} is for the entity {entity!r}; it must be user or item", model=model_name)
    spec = TowerSpec.from_json(model_entry)
    labels = tuple(str(label) for label in model_entry.get("labels", ()))
    if labels and len(labels) != spec.output_dims:
        raise BundleError(
            f"{model_name} gives {spec.output_dims} numbers, but {BUNDLE_FILE} has {len(labels)} labels for them",
            model=model_name,
        )
    program_entry, weights_entry = model_entry.get("program"), model_entry.get("weights")
    model_path = _listed_file(bundle_folder, model_entry)
    return BundleModel(
        model_name, model_path, str(model_entry["sha256"]), entity, spec, labels,
        _listed_file(bundle_folder, program_entry) if program_entry else None,
        str(program_entry["sha256"]) if program_entry else "",
        _weights_path(bundle_folder, model_name, model_path, weights_entry) if weights_entry else None,
        str(weights_entry["sha256"]) if weights_entry else "",
    )  # fmt: skip


def _weights_path(bundle_folder: Path, model_name: str, model_path: Path, weights_entry: Mapping[str, Any]) -> Path:
    """Return a model's weights file; raise BundleError unless it is in the model's folder, as ONNX Runtime needs."""
    weights_path = _listed_file(bundle_folder, weights_entry)
    if weights_path.parent != model_path.parent:
        raise BundleError(
            f"{model_name} has its weights in {weights_entry['path']}: they must be in the folder of {model_path.name}"
        )
    if (size_bytes := weights_path.stat().st_size) > WEIGHTS_BYTES_MAX:
        raise BundleError(
            f"{weights_path.name} has {size_bytes:,} bytes, more than {WEIGHTS_BYTES_MAX:,}: use fewer dimensions"
        )
    return weights_path


def _listed_file(bundle_folder: Path, file_entry: Mapping[str, Any]) -> Path:
    real_folder = bundle_folder.resolve()
    real_path = (real_folder / str(file_entry["path"])).resolve()
    if not real_path.is_relative_to(real_folder):
        raise BundleError(f"{BUNDLE_FILE} names {file_entry['path']}, which is outside the bundle")
    if not real_path.is_file():
        raise BundleError(f"{BUNDLE_FILE} names {file_entry['path']}, which is missing", path=str(file_entry["path"]))
    return real_path


def _demand_distinct_names(models: Sequence[BundleModel]) -> None:
    """Raise BundleError for two files with the same name in a generation, which has all models in one folder."""
    sha256_by_name: dict[str, str] = {}
    for _, file_name, sha256 in (file_entry for model in models for file_entry in model.files):
        if sha256_by_name.setdefault(file_name, sha256) != sha256:
            raise BundleError(f"two files would have the name {file_name} in a generation: rename the weights")


def _read_vocabulary(items_file: ItemsFile) -> Vocabulary:
    demand_sha256(items_file.path, items_file.sha256)
    id_table, file_name = pq.read_table(items_file.path), items_file.path.name
    if id_table.column_names != ["id"] or not (
        pa.types.is_string(id_table.schema.field("id").type)
        or pa.types.is_large_string(id_table.schema.field("id").type)
    ):
        raise BundleError(f"{file_name} has the columns {id_table.schema}, instead of one string column `id`")
    id_column = id_table.column("id")
    try:
        id_column.validate(full=True)  # also raised for invalid UTF-8
    except pa.ArrowInvalid as error:
        raise BundleError(f"{file_name}: {error}; ids must be UTF-8") from error
    id_length_bounds = pc.min_max(pc.binary_length(id_column)).as_py()
    has_valid_lengths = not len(id_column) or (
        (id_length_bounds["min"] or 0) >= 1 and id_length_bounds["max"] <= ID_BYTES_MAX
    )
    if id_column.null_count or not has_valid_lengths:
        raise BundleError(
            f"{file_name}: {id_column.null_count} ids are missing, the others have {id_length_bounds['min']} to "
            f"{id_length_bounds['max']} bytes: ids need 1 to {ID_BYTES_MAX} bytes"
        )
    if (id_count := len(id_column)) != items_file.item_count:
        raise BundleError(
            f"{file_name} has {id_count} items, {BUNDLE_FILE} states {items_file.item_count}", count=id_count
        )
    vocabulary = Vocabulary.of(to_string_chunks(id_column))
    if vocabulary is None:
        raise BundleError(f"{file_name} has an item twice")
    return vocabulary


def _verify_model(model: BundleModel) -> None:
    for file_path, _, sha256 in model.files:
        demand_sha256(file_path, sha256)
    if model.program_path is not None:
        demand_sha256(model.program_path, model.program_sha256)


def _check_model(model: BundleModel, model_path: Path, item_count: int) -> None:
    """Open the model once; refuse unlisted weights, and a padding index that is one of the items."""
    demand_weights(model.name, model_path, model.weights_path)
    try:
        Tower.open(model_path, model.spec)
    except BundleError:
        if model_path != model.path:
            Tower.open(model.path, model.spec)  # errors of the model are raised under its own name
        raise
    history = model.spec.history
    if history is not None and history.pad is not None and 0 <= history.pad < item_count:
        raise BundleError(
            f"{model.name} pads with {history.pad}, which is one of the {item_count} items", model=model.name
        )


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Model to be written into a bundle: ONNX, its specification, and its `torch.export` program if there is one."""

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
    """Write a bundle and open it; ids may be Arrow strings.

    `bundle.json` is written last, so that an incomplete bundle never opens.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / BUNDLE_FILE).unlink(missing_ok=True)
    pq.write_table(pa.table({"id": to_arrow_strings(item_ids)}), path / ITEMS_FILE)
    description: dict[str, Any] = {
        "format": FORMATS[BUNDLE].written_version,
        "name": name,
        "version": version,
        "dims": dims,
        "metric": metric,
        "items": {"path": ITEMS_FILE, "count": len(item_ids), "sha256": sha256_of(path / ITEMS_FILE)},
        "user_tower": _write_model_files(path, "user_tower", user_tower),
        "item_tower": _write_model_files(path, "item_tower", item_tower),
        "values": {
            value_name: {
                "entity": model.entity,
                "labels": list(model.labels),
                **_write_model_files(path, value_name, model),
            }
            for value_name, model in (values or {}).items()
        },
        "training": dict(training or {}),
    }
    write_atomically(path / BUNDLE_FILE, orjson.dumps(description, option=orjson.OPT_INDENT_2))
    return Bundle.open(path)


def _write_model_files(bundle_folder: Path, name: str, model: ModelFile) -> dict[str, Any]:
    model_path = bundle_folder / f"{name}.onnx"
    weights_path = model.onnx.write(model_path)
    description_entry = {"path": model_path.name, "sha256": sha256_of(model_path), **model.spec.to_json()}
    if weights_path is not None:
        description_entry["weights"] = {"path": weights_path.name, "sha256": sha256_of(weights_path)}
    if model.program is not None:
        program_path = bundle_folder / f"{name}.pt2"
        write_atomically(program_path, model.program)
        description_entry["program"] = {"path": program_path.name, "sha256": sha256_of(program_path)}
    return description_entry


def demand_sha256(path: Path, expected_sha256: str) -> None:
    """Raise BundleError for a file of a bundle that differs from its checksum in `bundle.json`."""
    if (actual_sha256 := sha256_of_unchanged(path)) != expected_sha256:
        raise BundleError(
            f"{path.name} has SHA-256 {actual_sha256}, bundle.json says {expected_sha256}", path=path.name
        )


def sha256_of_unchanged(path: Path) -> str:
    """Return the SHA-256 of a file; a file that is unchanged since this process hashed it is not read again.

    Device, inode, size, time of modification and of the last change of the inode identify the version. The kernel sets
    the last one: writing to a file or replacing it changes that time, whatever times a program sets.
    """
    file_stat = path.stat()
    file_stamp = (file_stat.st_dev, file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns)
    is_settled = time.time_ns() - file_stat.st_ctime_ns > SETTLED_AFTER_NS
    return _sha256_once(path, file_stamp) if is_settled else sha256_of(path)


@cached(_digest_by_stamp, key=lambda _path, stamp: stamp, lock=threading.Lock())
def _sha256_once(path: Path, _stamp: FileStamp) -> str:
    return sha256_of(path)
