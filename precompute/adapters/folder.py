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
from precompute.adapters.fold_in import HISTORY_ITEMS_MAX, complete_row_mask, user_inputs
from precompute.adapters.inputs import CLICK_COLUMNS, ClickMatrix, EntityVectors
from precompute.bundles.agreement import NEWEST_OVERLAP_FACT, measure_agreement
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.bundle_store import all_handovers, hand_over, heal_swap, is_superseded, swap_in_folder
from precompute.bundles.held_out import SHARE_ABOVE_RANDOM_FACT
from precompute.bundles.imports import IMPORT_REPORT_FILE, note_import_begun, write_import_report
from precompute.bundles.onnx_model import OnnxModel, item_tower
from precompute.bundles.quantize import quantize_tower
from precompute.config.settings import NightConfig, night_config
from precompute.sources.features import read_feature_values, without_long_texts
from precompute.sources.unusable import TEXT_TOO_LONG_REASON

BUNDLE_FOLDER, USER_VECTORS_FILE, CLICKS_FILE, SETTINGS_FILE = (
    "bundle", "user_vectors.parquet", "clicks.parquet", "larder.toml"
)  # fmt: skip
OWN_TOWER_FOLD_IN = "the user tower itself"
"""Fold-in of a model whose user tower takes histories or features."""
_COLUMN_SETTINGS = ("user_column", "item_column", "timestamp_column")
FEATURE_SETTINGS = frozenset({"user_features", "item_features"})
COMPARED_HISTORIES_MAX = 256
"""Maximum number of histories on which the int8 form is compared."""

_SETTINGS_TEMPLATE = """\
# Written by an import; later imports do not change it. All settings: `python -m cache.config.reference`.
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
    """Report on an import; `recalls` by fold-in are held-out recall@20, `agreement` is that of the int8 form."""

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
    """True if an earlier import in the same folder was replaced and its settings were kept."""
    had_times: bool = False
    """True if the clicks came with times: they are written in that order, with their times if these are timestamps."""
    further_columns: tuple[str, ...] = ()
    """Columns of `item_features` that the model does not take; they are kept."""
    unused_columns: tuple[str, ...] = ()
    """Columns of `user_features` that the model does not take; they are not kept."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        recalls_text = ", ".join(f"{fold_name} {recall:.4f}" for fold_name, recall in self.recalls.items())
        users_text = "users by the tower"
        if self.fold_in != OWN_TOWER_FOLD_IN:
            users_text = f"{self.users:,} users with vectors"
        sizes_text = f"{self.items:,} items, {users_text}, {self.clicks:,} clicks"
        left_out_text = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items() if count)
        has_users = self.users or self.clicks
        todo_text = (
            "" if has_users else f"name the files of interactions in [sources] interactions of {SETTINGS_FILE}, "
        )
        replacement_note = f"the previous import is replaced, its {SETTINGS_FILE} kept"
        return [
            f"{self.model}: {sizes_text}, {self.dims} dimensions, {self.metric}",
            *([f"clicks left out: {left_out_text}"] if left_out_text else []),
            *(["clicks are ordered by their times"] if self.had_times else []),
            *([f"{self.folder}: {replacement_note}"] if self.is_again else []),
            *self._columns_in_words(),
            f"a history becomes a vector by {self.fold_in}"
            + (f" (recall@20 of held-out items: {recalls_text})" if recalls_text else ""),
            *self._agreement_in_words(),
            f"{self.bundle_bytes:,} bytes in {self.seconds:.1f} s",
            *(f"cannot: {limit_text}" for limit_text in self.cannot),
            f"next: cd {self.folder}, {todo_text}then larder check, larder night and larder serve",
        ]

    def _agreement_in_words(self) -> list[str]:
        if (overlap := self.agreement.get("overlap_at_20")) is None:
            return []
        agreement_text = f"the int8 form, which gives live answers, finds {overlap:.4f} of the exact top 20"
        if (newest_overlap := self.agreement.get(NEWEST_OVERLAP_FACT)) is not None:
            agreement_text += f", and {newest_overlap:.4f} from a history of one item"
        return [f'{agreement_text} ([serving] precision = "fp32" gives exact lists)']

    def _columns_in_words(self) -> list[str]:
        remarks = []
        if self.further_columns:
            columns_text = ", ".join(self.further_columns)
            remarks.append(
                f"further columns of item_features, which the model does not take, are kept: {columns_text}; for "
                "filters, name them in [sources] item_attributes"
            )
        if self.unused_columns:
            columns_text = ", ".join(self.unused_columns)
            remarks.append(f"columns of user_features that the model does not take are left out: {columns_text}")
        return remarks


@dataclass(frozen=True, slots=True, eq=False)
class ImportedModel:
    """Imported model: its towers, and vectors and clicks of known users, if any.

    `item_tower` None stands for a table of the items' vectors. `feature_table_by_setting` are Arrow tables by the name
    of their setting (`user_features`, `item_features`).
    """

    model_title: str
    items: EntityVectors
    user_tower: OnnxModel
    user_spec: TowerSpec
    metric: Metric
    fold_name: str
    recall_by_fold: Mapping[str, float]
    users: EntityVectors | None
    clicks: ClickMatrix | None
    limit_texts: tuple[str, ...]
    item_tower: ModelFile | None = None
    feature_table_by_setting: Mapping[str, Any] = field(default_factory=dict)
    share_by_chance: float | None = None
    """Share of pairs in which a clicked item scores above a random one, if it is no more than chance; else None."""
    further_columns: tuple[str, ...] = ()
    """Columns of `item_features` that the model does not take."""
    unused_columns: tuple[str, ...] = ()
    """Columns of `user_features` that the model does not take; they are in no table."""
    user_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Feature inputs of the user tower by name, with a row for each user of the clicks."""
    nonfinite_user_count: int = 0
    """Number of users with all features but a vector that is not finite."""
    share_above_random: float | None = None
    """Share of pairs in which a held-out click scores above a random item, if the model has its own user tower."""


def open_import_folder(import_folder: Path) -> None:
    """Make the folder of an import; raise ConfigError, with nothing written, for a folder with other contents."""
    if import_folder.exists() and (
        not import_folder.is_dir()
        or (any(import_folder.iterdir()) and not (import_folder / IMPORT_REPORT_FILE).exists())
    ):
        raise ConfigError(f"{import_folder} exists and was not made by an import: name another folder")
    import_folder.mkdir(parents=True, exist_ok=True)
    if not (import_folder / IMPORT_REPORT_FILE).exists():
        write_atomically(
            import_folder / IMPORT_REPORT_FILE, b"{}"
        )  # marks the folder, so that an interrupted import can be repeated


def write_folder(import_folder: Path, imported: ImportedModel, started_at: float) -> ImportReport:
    """Write the folder, each file atomically; replace earlier files, but keep the settings.

    Raises ConfigError, with nothing written, for a folder that was not made by an import.
    """
    open_import_folder(import_folder)
    sweep_import_leftovers(import_folder)
    staging_folder = import_folder / f".{BUNDLE_FOLDER}.{secrets.token_hex(4)}.part"
    try:
        bundle = write_model_bundle(imported, staging_folder)
        agreement_facts = _measure_agreement(bundle, imported)
        size_bytes = sum(bundle_file.stat().st_size for bundle_file in staging_folder.iterdir())
        note_import_begun(import_folder)
        swap_in_folder(staging_folder, import_folder / BUNDLE_FOLDER)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    click_columns = _click_columns(import_folder, imported)
    _write_tables(import_folder, imported, click_columns)
    limit_texts, is_again = imported.limit_texts, (import_folder / SETTINGS_FILE).exists()
    if is_again:
        limit_texts += _unnamed_files_remarks((import_folder / SETTINGS_FILE).read_text(encoding="utf-8"), imported)
        limit_texts += _twice_counted_remarks(import_folder, imported)
        limit_texts += tuple(filter(None, [reinstate_bundle(import_folder)]))
    else:
        users_setting = f'user_vectors = "{USER_VECTORS_FILE}"\n' if imported.users is not None else ""
        users_setting += "".join(
            f'{column_name} = "{column_name}.parquet"\n' for column_name in imported.feature_table_by_setting
        )
        clicks_setting = (
            "# TO DO: name the files of interactions and their columns\ninteractions = []\n# user_column = "
            '"user"\n# item_column = "item"\n# timestamp_column = "timestamp"'
        )
        if imported.users is not None:
            clicks_setting = (
                "interactions = []     # files of interactions, if there are any: their items are left out of lists"
            )
        if imported.clicks is not None:
            clicks_setting = (
                f'interactions = ["{CLICKS_FILE}"]     # their items are left out of lists; other files can be named '
                "instead"
            )
            clicks_setting += "".join(
                f"\n{setting} = {orjson.dumps(column_name).decode()}"
                for setting, column_name, usual_name in zip(_COLUMN_SETTINGS, click_columns, CLICK_COLUMNS, strict=True)
                if column_name != usual_name
            )
        write_atomically(
            import_folder / SETTINGS_FILE,
            _SETTINGS_TEMPLATE.format(users=users_setting, clicks=clicks_setting).encode(),
        )
    if (user_features := imported.feature_table_by_setting.get("user_features")) is not None:
        limit_texts += limits_of_user_features(
            import_folder, user_features, imported.user_spec, imported.nonfinite_user_count
        )
    report = ImportReport(
        str(import_folder), imported.model_title, len(imported.items.entity_ids),
        0 if imported.users is None else len(imported.users.entity_ids),
        0 if imported.clicks is None else int(imported.clicks.matrix.nnz), imported.items.dims, imported.metric,
        imported.fold_name,
        dict(imported.recall_by_fold), agreement_facts, size_bytes, round(time.perf_counter() - started_at, 3),
        limit_texts,
        {} if imported.clicks is None else dict(imported.clicks.left_out_by_reason), is_again,
        imported.clicks is not None and imported.clicks.is_time_ordered, imported.further_columns,
        imported.unused_columns,
    )  # fmt: skip
    write_import_report(import_folder, report.to_json(), bundle.digest)
    return report


def sweep_import_leftovers(import_folder: Path) -> None:
    """Remove leftovers of interrupted imports; restore a bundle that one of them had moved aside."""
    heal_swap(import_folder / BUNDLE_FOLDER)
    for leftover_path in import_folder.glob(".*.part"):
        if leftover_path.is_dir():
            shutil.rmtree(leftover_path, ignore_errors=True)
        else:
            leftover_path.unlink(missing_ok=True)


def _click_columns(import_folder: Path, imported: ImportedModel) -> tuple[str, str, str]:
    """Return the names of the columns of users, items and times, from kept settings or else from the clicks."""
    if (import_folder / SETTINGS_FILE).exists():
        sources = _settings_or_defaults(import_folder).sources
        return sources.user_column, sources.item_column, sources.timestamp_column
    return CLICK_COLUMNS if imported.clicks is None else imported.clicks.click_columns


def _settings_or_defaults(import_folder: Path) -> NightConfig:
    """Return a folder's settings, or the defaults if the settings are invalid, which `larder check` will report."""
    try:
        return night_config(str(import_folder / SETTINGS_FILE))
    except LarderError:
        return NightConfig()


def reinstate_bundle(import_folder: Path) -> str:
    """Hand the folder's bundle over once more if nights would use a later one; return a remark, or an empty text.

    A bundle that was imported before, and followed by another, is an old one for the store.
    """
    try:
        config = night_config(str(import_folder / SETTINGS_FILE))
        if config.path(config.bundle).resolve() != (import_folder / BUNDLE_FOLDER).resolve():
            return ""
        bundle = Bundle.open(import_folder / BUNDLE_FOLDER)
        if not is_superseded(bundle.digest, all_handovers(config.store())):
            return ""
        hand_over(config.store(), bundle)
    except LarderError as error:
        return (
            f"say which bundle nights use: {error.message}; if an earlier import was this same model, run "
            f"`larder hand-over {BUNDLE_FOLDER}` in {import_folder}"
        )
    return ""


def limits_of_user_features(
    import_folder: Path, user_table: Any, spec: TowerSpec, nonfinite_outputs: int
) -> tuple[str, ...]:
    """Return limits of a table of users' features: rows that a night leaves out, and shares that the gate refuses.

    Thresholds are those of the folder's settings.
    """
    config, limit_texts, row_count = (_settings_or_defaults(import_folder), list[str](), user_table.num_rows)
    row_count_by_lack = {"have an output that is not finite": nonfinite_outputs}
    for input_spec in spec.features:
        column = user_table[str(input_spec.column)].combine_chunks()
        column, is_long = without_long_texts(column, config.feature_text_bytes)
        mask_by_reason = dict(read_feature_values(column, input_spec).unusable_mask_by_reason)
        if long_count := int(is_long.sum()):
            mask_by_reason[f"{input_spec.column}: {TEXT_TOO_LONG_REASON}"] = is_long
            limit_texts.append(
                f"answer for {long_count:,} of {row_count:,} rows: a text of {input_spec.column!r} is longer than "
                f"feature_text_bytes ({config.feature_text_bytes:,}): shorten the text, or raise feature_text_bytes in "
                f"{SETTINGS_FILE}"
            )
        if mask_by_reason:
            is_unusable = np.logical_or.reduce(list(mask_by_reason.values()))
            row_count_by_lack[f"cannot be used ({', '.join(mask_by_reason)})"] = int(is_unusable.sum())
    threshold = config.gates.unusable_rows
    limit_texts += [
        f"have a night published: {count:,} of {row_count:,} rows ({count / row_count:.2%}) {lack}, and the gate "
        f"unusable_rows allows {threshold:.2%}: fill in the value that stood for a missing one in the training, leave "
        f"the rows out, or raise [gates] unusable_rows in {SETTINGS_FILE}"
        for lack, count in row_count_by_lack.items()
        if count > threshold * row_count and (count > 1 or not threshold)
    ]
    return tuple(limit_texts)


def _unnamed_files_remarks(settings_text: str, imported: ImportedModel) -> tuple[str, ...]:
    """Return remarks on files of this import that the kept settings do not name."""
    file_names = [f"{setting_name}.parquet" for setting_name in imported.feature_table_by_setting]
    file_names += [USER_VECTORS_FILE] * (imported.users is not None) + [CLICKS_FILE] * (imported.clicks is not None)
    return tuple(
        f"use {file_name}: {SETTINGS_FILE}, which was kept, does not name it"
        for file_name in file_names
        if file_name not in settings_text
    )


def _twice_counted_remarks(import_folder: Path, imported: ImportedModel) -> tuple[str, ...]:
    """Return a remark on further files of interactions in kept settings: they may repeat the imported clicks."""
    try:
        interaction_files = night_config(str(import_folder / SETTINGS_FILE)).sources.interactions
    except LarderError:  # `larder check` reports these settings
        return ()
    further_files = [name for name in interaction_files if name != CLICKS_FILE]
    if imported.clicks is None or CLICKS_FILE not in interaction_files or not further_files:
        return ()
    remark = (
        f"tell whether these clicks repeat rows of {', '.join(further_files)}, which {SETTINGS_FILE} names, too: "
        "repeated rows count twice; if so, remove the files from [sources] interactions"
    )
    return (remark,)


def write_model_bundle(imported: ImportedModel, bundle_folder: Path, **training_facts: Any) -> Bundle:
    """Write the model into a folder as a bundle; `training` gets the `training_facts` and those of the fold-in.

    The same model gives the same bytes.
    """
    dims, spec = imported.items.dims, imported.user_spec
    if imported.share_above_random is not None:
        training_facts[SHARE_ABOVE_RANDOM_FACT] = imported.share_above_random
    return write_bundle(
        bundle_folder,
        name=imported.model_title,
        version="1",
        dims=dims,
        item_ids=imported.items.entity_ids,
        metric=imported.metric,
        user_tower=ModelFile(imported.user_tower, spec),
        item_tower=imported.item_tower
        or ModelFile(
            item_tower(imported.items.vectors),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", dims),
            entity="item",
        ),
        training={
            "imported": imported.model_title,
            "fold_in": imported.fold_name,
            "recalls": dict(imported.recall_by_fold),
            **training_facts,
        },
    )


def _write_tables(import_folder: Path, imported: ImportedModel, click_columns: tuple[str, str, str]) -> None:
    """Write clicks, users' vectors and features as Parquet; remove earlier imports' files that this one lacks."""
    part_path = import_folder / f".{secrets.token_hex(4)}.part"
    try:
        if imported.clicks is None:
            (import_folder / CLICKS_FILE).unlink(missing_ok=True)
        else:
            imported.clicks.write(part_path, imported.items.entity_ids, click_columns)
            part_path.replace(import_folder / CLICKS_FILE)
        if imported.users is None:
            (import_folder / USER_VECTORS_FILE).unlink(missing_ok=True)
        else:
            vector_column = pa.FixedSizeListArray.from_arrays(
                pa.array(imported.users.vectors.ravel()), imported.users.dims
            )
            pq.write_table(pa.table({click_columns[0]: imported.users.entity_ids, "vector": vector_column}), part_path)
            part_path.replace(import_folder / USER_VECTORS_FILE)
        for setting_name in FEATURE_SETTINGS - imported.feature_table_by_setting.keys():
            (import_folder / f"{setting_name}.parquet").unlink(missing_ok=True)
        for setting_name, table in imported.feature_table_by_setting.items():
            id_column = click_columns[0] if setting_name == "user_features" else click_columns[1]
            pq.write_table(table.rename_columns([id_column, *table.column_names[1:]]), part_path)
            part_path.replace(import_folder / f"{setting_name}.parquet")
    finally:
        part_path.unlink(missing_ok=True)


def _measure_agreement(bundle: Bundle, imported: ImportedModel) -> dict[str, Any]:
    """Measure the agreement of the user tower's int8 form, for known users with clicks; empty if there are none."""
    clicks, spec, feature_inputs = imported.clicks, imported.user_spec, imported.user_inputs
    if clicks is None or (spec.features and not feature_inputs):
        return {}
    are_usable = complete_row_mask(feature_inputs, clicks.matrix.shape[0])
    sampled_users = clicks.sample_users(COMPARED_HISTORIES_MAX, 1, np.random.default_rng(0), are_usable)
    if not len(sampled_users):
        return {}
    history_items_max = HISTORY_ITEMS_MAX if spec.history is None else spec.history.max_length or 1
    histories: Histories = clicks.histories(sampled_users, history_items_max)
    inputs = user_inputs(
        spec,
        histories,
        {input_name: feature_values[sampled_users] for input_name, feature_values in feature_inputs.items()},
    )
    with tempfile.TemporaryDirectory() as temporary_folder:
        int8_path = Path(temporary_folder) / "int8.onnx"
        try:
            quantize_tower(bundle.user_tower.path, imported.user_spec, inputs, int8_path)
        except BundleError as error:
            return {"why_not": error.message}
        return measure_agreement(
            Tower.open(bundle.user_tower.path, imported.user_spec), Tower.open(int8_path, imported.user_spec), inputs,
            imported.items.vectors, metric=imported.metric, excluded_ordinals=histories,
        )  # fmt: skip
