"""Items that a night can answer for: the catalogue laid out, and once more without those that have no vector."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.tower import Tower
from cache.process.host import usable_cores
from precompute.bundles.bundle import Bundle
from precompute.config.devices import device_of
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.partitions.item_features import ItemFeatures, write_item_features
from precompute.reuse.base import BaseGeneration
from precompute.reuse.items import CopiedVectors, write_item_digests
from precompute.scoring.encoding import finite_rows
from precompute.scoring.shard import embed_catalogue
from precompute.sources.event_values import NO_VALUES, EntityValues
from precompute.sources.unusable import NOT_FINITE, UnusableRows


def lay_out_items(
    config: NightConfig,
    bundle: Bundle,
    root: Path,
    *,
    erased: Collection[bytes],
    unusable: UnusableRows,
    base: BaseGeneration | None = None,
    values: EntityValues = NO_VALUES,
    event_item_ids: Collection[bytes] = (),
) -> tuple[dict[str, Any], str | None]:
    """Write the catalogue and the columns of its features; returns its facts, and the columns' file if there is one.

    Features have the `values` that events set, also those of items that these `event_item_ids`. Vectors that `base` has
    are known to be finite. An item whose vector is not is left out, and noted as an output of the item tower; raises
    SourceError where that is every item.
    """
    laid = catalogue.write_catalogue(
        config,
        bundle,
        root,
        erased=erased,
        values=values,
        event_item_ids=event_item_ids,
        unusable=unusable,
    )
    items = catalogue.open_items(root, laid)
    columns = write_item_features(
        config, bundle, items, root, values=values, event_item_ids=event_item_ids, unusable=unusable
    )
    write_item_digests(bundle, items, root)
    is_nonfinite = _not_finite(config, bundle, items, root, base)
    source = f"outputs of {bundle.item_tower.name}"
    unusable.looked_at(source, items.count)
    if is_nonfinite.any():
        of_events = np.zeros(items.count, np.bool_)
        ordinals = items.ordinals_of(list(values))
        of_events[ordinals[ordinals >= 0]] = True
        unusable.note_rows(
            source, {NOT_FINITE: is_nonfinite}, lambda row: {"item": items.id_of(row)}, of_events
        )
        unusable.demand_some(source, f"the {source}")
        left_out = catalogue.item_texts(items).filter(pa.array(is_nonfinite))
        laid = catalogue.write_catalogue(
            config,
            bundle,
            root,
            erased=erased,
            left_out=left_out,
            values=values,
            event_item_ids=event_item_ids,
        )
        items = catalogue.open_items(root, laid)
        columns = write_item_features(
            config, bundle, items, root, values=values, event_item_ids=event_item_ids
        )
        write_item_digests(bundle, items, root)
    return laid, columns


def _not_finite(
    config: NightConfig, bundle: Bundle, items: ItemTable, root: Path, base: BaseGeneration | None
) -> NDArray[np.bool_]:
    model, threads = bundle.item_tower, config.threads or usable_cores()
    kept_vectors = CopiedVectors.of(base, bundle, items, root, device_of(config.device, 0))
    tower = Tower.open(model.path, model.spec, threads=threads)
    features = ItemFeatures.open(root / catalogue.ITEM_FEATURES, model.spec, items.count)
    nonfinite_masks = [
        ~finite_rows(vectors) for vectors in embed_catalogue(tower, items, features, kept_vectors)
    ]
    return np.concatenate(nonfinite_masks)
