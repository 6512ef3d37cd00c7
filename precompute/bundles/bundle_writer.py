"""Writing a bundle: serialised models and their specifications in, the folder that `Bundle.open` reads out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cache.format.manifest import EntityKind
from cache.formats import BUNDLE, FORMATS
from cache.model.ranking import Metric
from cache.model.tower_spec import TowerSpec
from cache.store.artefacts import sha256_of, write_atomically
from precompute.bundles.bundle import FILE, ITEMS_FILE, Bundle
from precompute.bundles.onnx_model import OnnxModel
from precompute.sources.columns import strings_of


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
    (path / FILE).unlink(missing_ok=True)
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
    write_atomically(path / FILE, orjson.dumps(data, option=orjson.OPT_INDENT_2))
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
