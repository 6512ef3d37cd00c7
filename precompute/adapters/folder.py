"""Writer of an imported model's folder: bundle, vectors of users, clicks, settings, and the report."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.errors import BundleError, ConfigError, LarderError
from cache.model.ranking import Metric
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.store.artefacts import write_atomically
from precompute.adapters.fold_in import HISTORY_MAX, complete_rows, user_inputs
from precompute.adapters.inputs import COLUMNS, ClickMatrix, Vectors
from precompute.bundles.agreement import NEWEST_OVERLAP, agreement
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.bundle_store import (
    hand_over,
    handed_over,
    heal_swap,
    is_superseded,
    swap_in,
)
from precompute.bundles.held_out import SHARE_ABOVE_RANDOM
from precompute.bundles.imports import REPORT, note_import_begun, write_import
from precompute.bundles.onnx_model import OnnxModel, item_tower
from precompute.bundles.quantize import quantize_tower
from precompute.config.settings import NightConfig, night_config
from precompute.sources.features import read_values, without_long_texts
from precompute.sources.unusable import TOO_LONG

BUNDLE, USERS, CLICKS, SETTINGS = (
    "bundle", "user_vectors.parquet", "clicks.parquet", "larder.toml"
)  # fmt: skip
OWN_TOWER = "the user tower itself"
"""Fold-in of a model whose user tower takes histories or features."""
_COLUMN_SETTINGS = ("user_column", "item_column", "timestamp_column")
FEATURES = frozenset({"user_features", "item_features"})
COMPARED = 256
"""Number of histories on which the int8 form is compared."""

_SETTINGS = """\
# Written by an import, and never over a file that is there. All settings: `python -m cache.config.reference`.
bundle = "bundle"
artifacts = "artifacts"
state = "state"

[sources]
{clicks}
{users}
[tables.user_topk]
kind = "user_topk"
k = 100

[tables.user_vector]
kind = "user_vector"
precision = "f4"

[tables.item_vector]
kind = "item_vector"

[tables.item_similar]
kind = "item_similar"
metric = "cosine"
"""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Report on an import; `recalls`: held-out recall@20 of fold-ins, `agreement`: of the int8 form."""

    folder: str
    model: str
    items: int
    users: int
    clicks: int
    dims: int
    metric: str
    fold_in: str
    recalls: dict[str, float]
    agreement: dict[str, Any]
    bundle_bytes: int
    seconds: float
    cannot: tuple[str, ...]
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of given clicks that are not in the folder, by reason."""
    is_again: bool = False
    """True if an earlier import in the same folder was replaced, its settings kept."""
    had_times: bool = False
    """True if the clicks came with times: they are written in that order, with the times if these are known in full."""
    further_columns: tuple[str, ...] = ()
    """Columns of `item_features` that the model does not take; they are kept."""
    unused_columns: tuple[str, ...] = ()
    """Columns of `user_features` that the model does not take; they are not kept."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        tried = ", ".join(f"{name} {recall:.4f}" for name, recall in self.recalls.items())
        users = "users by the tower"
        if self.fold_in != OWN_TOWER:
            users = f"{self.users:,} users with vectors"
        size = f"{self.items:,} items, {users}, {self.clicks:,} clicks"
        left_out_text = ", ".join(
            f"{count:,} {reason}" for reason, count in self.left_out.items() if count
        )
        has_users = self.users or self.clicks
        todo = "" if has_users else f"name what users did in [sources] interactions of {SETTINGS}, "
        replacement_note = f"the import before it is replaced, its {SETTINGS} kept"
        return [
            f"{self.model}: {size}, {self.dims} dimensions, {self.metric}",
            *([f"clicks left out: {left_out_text}"] if left_out_text else []),
            *(["times of clicks put them in order"] if self.had_times else []),
            *([f"{self.folder}: {replacement_note}"] if self.is_again else []),
            *self._columns_in_words(),
            f"a history becomes a vector by {self.fold_in}"
            + (f" (recall@20 of what was held out: {tried})" if tried else ""),
            *self._agreement_in_words(),
            f"{self.bundle_bytes:,} bytes in {self.seconds:.1f} s",
            *(f"cannot: {limit}" for limit in self.cannot),
            f"next: cd {self.folder}, {todo}then larder check, larder night and larder serve",
        ]

    def _agreement_in_words(self) -> list[str]:
        if (overlap := self.agreement.get("overlap_at_20")) is None:
            return []
        line = f"int8, which answers live, finds {overlap:.4f} of the exact top 20"
        if (newest_overlap := self.agreement.get(NEWEST_OVERLAP)) is not None:
            line += f", and {newest_overlap:.4f} from a history of one item"
        return [f'{line} ([serving] precision = "fp32" finds all)']

    def _columns_in_words(self) -> list[str]:
        remarks = []
        if self.further_columns:
            named = ", ".join(self.further_columns)
            remarks.append(
                f"further columns of item_features, which the model does not take, are kept: {named}; name those that "
                "filters may ask for in [sources] item_attributes"
            )
        if self.unused_columns:
            named = ", ".join(self.unused_columns)
            remarks.append(
                f"left out of user_features, since the model does not take them: {named}"
            )
        return remarks


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """Imported model: its towers, and vectors and clicks of known users, if any.

    `item_tower` is a table of the items' vectors, if none is given. `features` are Arrow tables by the name of their
    setting (`user_features`, `item_features`).
    """

    model: str
    items: Vectors
    user_tower: OnnxModel
    user_spec: TowerSpec
    metric: Metric
    fold_in: str
    recalls: Mapping[str, float]
    users: Vectors | None
    clicks: ClickMatrix | None
    cannot: tuple[str, ...]
    item_tower: ModelFile | None = None
    features: Mapping[str, Any] = field(default_factory=dict)
    share_by_chance: float | None = None
    """Share of pairs in which a clicked item scores above a random one, if that is no more than by chance."""
    further_columns: tuple[str, ...] = ()
    """Columns of `item_features` that the model does not take."""
    unused_columns: tuple[str, ...] = ()
    """Columns of `user_features` that the model does not take; no table has them."""
    user_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Feature inputs of the user tower by name, a row for each user of the clicks."""
    nonfinite_outputs: int = 0
    """Number of users with all features whose vector is not finite."""
    share_above_random: float | None = None
    """Share of pairs in which a held-out click scores above a random item, for a tower of the model's own."""


def open_import_folder(to: Path) -> None:
    """Make the folder of an import; raise ConfigError, with nothing written, for a folder with other contents."""
    if to.exists() and (not to.is_dir() or (any(to.iterdir()) and not (to / REPORT).exists())):
        raise ConfigError(f"{to} exists and was not made by an import: name another folder")
    to.mkdir(parents=True, exist_ok=True)
    if not (to / REPORT).exists():
        write_atomically(
            to / REPORT, b"{}"
        )  # so that an import that dies on its way can be run again


def write_folder(to: Path, imported: Imported, started_at: float) -> ImportReport:
    """Write the folder, each file in one move; replace earlier files, but keep the settings.

    Raises ConfigError for a folder that holds something else, with nothing written.
    """
    open_import_folder(to)
    sweep_import(to)
    staging_folder = to / f".{BUNDLE}.{secrets.token_hex(4)}.part"
    try:
        bundle = bundle_of(imported, staging_folder)
        compared = _agreement(bundle, imported)
        size_bytes = sum(bundle_file.stat().st_size for bundle_file in staging_folder.iterdir())
        note_import_begun(to)
        swap_in(staging_folder, to / BUNDLE)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    columns = _columns(to, imported)
    _write_tables(to, imported, columns)
    limits, is_again = imported.cannot, (to / SETTINGS).exists()
    if is_again:
        limits += _unnamed((to / SETTINGS).read_text(encoding="utf-8"), imported)
        limits += _counted_twice(to, imported)
        limits += tuple(filter(None, [reinstate_bundle(to)]))
    else:
        users = f'user_vectors = "{USERS}"\n' if imported.users is not None else ""
        users += "".join(f'{name} = "{name}.parquet"\n' for name in imported.features)
        clicks = (
            "# TO DO: files of what users did, and how their columns are called\ninteractions = []\n"
            '# user_column = "user"\n# item_column = "item"\n# timestamp_column = "timestamp"'
        )
        if imported.users is not None:
            clicks = "interactions = []     # files of what users did, if you have any: left out of their lists"
        if imported.clicks is not None:
            clicks = f'interactions = ["{CLICKS}"]     # left out of their lists; or your own files'
            clicks += "".join(
                f"\n{setting} = {orjson.dumps(name).decode()}"
                for setting, name, usual_name in zip(
                    _COLUMN_SETTINGS, columns, COLUMNS, strict=True
                )
                if name != usual_name
            )
        write_atomically(to / SETTINGS, _SETTINGS.format(users=users, clicks=clicks).encode())
    if (user_features := imported.features.get("user_features")) is not None:
        limits += rows_that_refuse(
            to, user_features, imported.user_spec, imported.nonfinite_outputs
        )
    report = ImportReport(
        str(to), imported.model, len(imported.items.ids), 0 if imported.users is None else len(imported.users.ids),
        0 if imported.clicks is None else int(imported.clicks.matrix.nnz), imported.items.dims, imported.metric,
        imported.fold_in,
        dict(imported.recalls), compared, size_bytes, round(time.perf_counter() - started_at, 3), limits,
        {} if imported.clicks is None else dict(imported.clicks.left_out), is_again,
        imported.clicks is not None and imported.clicks.is_ordered, imported.further_columns, imported.unused_columns,
    )  # fmt: skip
    write_import(to, report.to_json(), bundle.digest)
    return report


def sweep_import(to: Path) -> None:
    """Remove what killed imports have left; restore the bundle that one had moved aside."""
    heal_swap(to / BUNDLE)
    for leftover in to.glob(".*.part"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _columns(to: Path, imported: Imported) -> tuple[str, str, str]:
    """Return the names of columns of users, items and times: those of kept settings, else those of the clicks."""
    if (to / SETTINGS).exists():
        sources = _settings_of(to).sources
        return sources.user_column, sources.item_column, sources.timestamp_column
    return COLUMNS if imported.clicks is None else imported.clicks.columns


def _settings_of(to: Path) -> NightConfig:
    """Return a folder's settings; the defaults for settings that `larder check` will refuse by name."""
    try:
        return night_config(str(to / SETTINGS))
    except LarderError:
        return NightConfig()


def reinstate_bundle(to: Path) -> str:
    """Hand the folder's bundle over once more if nights would use a later one; return a remark, or nothing.

    The store knows a bundle that was imported before as an old one, if another one followed it.
    """
    try:
        config = night_config(str(to / SETTINGS))
        if config.path(config.bundle).resolve() != (to / BUNDLE).resolve():
            return ""
        bundle = Bundle.open(to / BUNDLE)
        if not is_superseded(bundle.digest, handed_over(config.store())):
            return ""
        hand_over(config.store(), bundle)
    except LarderError as error:
        return (
            f"say which bundle nights use: {error.message}; if an earlier import was this same model, run "
            f"`larder hand-over {BUNDLE}` in {to}"
        )
    return ""


def rows_that_refuse(
    to: Path, table: Any, spec: TowerSpec, nonfinite_outputs: int
) -> tuple[str, ...]:
    """Return limits about a table of users' features: rows that a night leaves out, and shares that refuse it.

    Thresholds are those of the folder's settings.
    """
    config, limits, rows = _settings_of(to), list[str](), table.num_rows
    refusals = {"have an output that is not finite": nonfinite_outputs}
    for feature in spec.features:
        column = table[str(feature.column)].combine_chunks()
        column, is_long = without_long_texts(column, config.feature_text_bytes)
        masks = dict(read_values(column, feature).unusable_mask_by_reason)
        if long_count := int(is_long.sum()):
            masks[f"{feature.column}: {TOO_LONG}"] = is_long
            limits.append(
                f"answer for {long_count:,} of {rows:,} rows: a text of {feature.column!r} is longer than "
                f"feature_text_bytes ({config.feature_text_bytes:,}): shorten it, or raise that in {SETTINGS}"
            )
        if masks:
            is_unusable = np.logical_or.reduce(list(masks.values()))
            refusals[f"cannot be used ({', '.join(masks)})"] = int(is_unusable.sum())
    threshold = config.gates.unusable_rows
    limits += [
        f"have a night published: {count:,} of {rows:,} rows ({count / rows:.2%}) {lack}, and the gate unusable_rows "
        f"lets {threshold:.2%} pass: fill in what the model was trained with for a missing value, leave the rows out, "
        f"or raise [gates] unusable_rows in {SETTINGS}"
        for lack, count in refusals.items()
        if count > threshold * rows and (count > 1 or not threshold)
    ]
    return tuple(limits)


def _unnamed(settings: str, imported: Imported) -> tuple[str, ...]:
    """Return remarks on kept settings that do not name files of this import."""
    files = [f"{name}.parquet" for name in imported.features]
    files += [USERS] * (imported.users is not None) + [CLICKS] * (imported.clicks is not None)
    return tuple(
        f"use {file_name}, which {SETTINGS} does not name: it was there, and is kept"
        for file_name in files
        if file_name not in settings
    )


def _counted_twice(to: Path, imported: Imported) -> tuple[str, ...]:
    """Return a remark on further files of interactions in kept settings, whose rows the clicks may hold as well."""
    try:
        named = night_config(str(to / SETTINGS)).sources.interactions
    except LarderError:  # kept settings that `larder check` will name
        return ()
    further = [name for name in named if name != CLICKS]
    if imported.clicks is None or CLICKS not in named or not further:
        return ()
    remark = (
        f"tell whether these clicks hold the rows of {', '.join(further)}, which {SETTINGS} names as well: those count "
        "twice then; leave the files out of [sources] interactions"
    )
    return (remark,)


def bundle_of(imported: Imported, folder: Path, **training: Any) -> Bundle:
    """Write the model into a folder as a bundle; its `training` has these entries and those of the fold-in.

    The same model is the same bytes.
    """
    dims, spec = imported.items.dims, imported.user_spec
    if imported.share_above_random is not None:
        training[SHARE_ABOVE_RANDOM] = imported.share_above_random
    return write_bundle(
        folder,
        name=imported.model,
        version="1",
        dims=dims,
        item_ids=imported.items.ids,
        metric=imported.metric,
        user_tower=ModelFile(imported.user_tower, spec),
        item_tower=imported.item_tower
        or ModelFile(
            item_tower(imported.items.rows),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", dims),
            entity="item",
        ),
        training={
            "imported": imported.model,
            "fold_in": imported.fold_in,
            "recalls": dict(imported.recalls),
            **training,
        },
    )


def _write_tables(to: Path, imported: Imported, columns: tuple[str, str, str]) -> None:
    """Write clicks, users' vectors and features as Parquet; remove an earlier import's files that have no successor."""
    part = to / f".{secrets.token_hex(4)}.part"
    try:
        if imported.clicks is None:
            (to / CLICKS).unlink(missing_ok=True)
        else:
            imported.clicks.write(part, imported.items.ids, columns)
            part.replace(to / CLICKS)
        if imported.users is None:
            (to / USERS).unlink(missing_ok=True)
        else:
            rows = pa.FixedSizeListArray.from_arrays(
                pa.array(imported.users.rows.ravel()), imported.users.dims
            )
            pq.write_table(pa.table({columns[0]: imported.users.ids, "vector": rows}), part)
            part.replace(to / USERS)
        for name in FEATURES - imported.features.keys():
            (to / f"{name}.parquet").unlink(missing_ok=True)
        for name, table in imported.features.items():
            id_column = columns[0] if name == "user_features" else columns[1]
            pq.write_table(table.rename_columns([id_column, *table.column_names[1:]]), part)
            part.replace(to / f"{name}.parquet")
    finally:
        part.unlink(missing_ok=True)


def _agreement(bundle: Bundle, imported: Imported) -> dict[str, Any]:
    """Measure the agreement of the user tower's int8 form, over known users with clicks; empty without any."""
    clicks, spec, features = imported.clicks, imported.user_spec, imported.user_inputs
    if clicks is None or (spec.features and not features):
        return {}
    are_usable = complete_rows(features, clicks.matrix.shape[0])
    rows = clicks.sample(COMPARED, 1, np.random.default_rng(0), are_usable)
    if not len(rows):
        return {}
    longest = HISTORY_MAX if spec.history is None else spec.history.max_length or 1
    histories: Histories = clicks.histories(rows, longest)
    inputs = user_inputs(spec, histories, {name: values[rows] for name, values in features.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        try:
            quantize_tower(bundle.user_tower.path, imported.user_spec, inputs, path)
        except BundleError as error:
            return {"why_not": error.message}
        return agreement(
            Tower.open(bundle.user_tower.path, imported.user_spec), Tower.open(path, imported.user_spec), inputs,
            imported.items.rows, metric=imported.metric, excluded=histories,
        )  # fmt: skip
