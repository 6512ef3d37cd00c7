"""Models of libraries on torch: RecBole, torch-rechub, sentence-transformers. Of a model only attributes are read."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cache.errors import SourceError
from cache.model.ranking import Metric
from precompute.adapters.folder import ImportReport
from precompute.adapters.inputs import ClickMatrix, Vectors, feature_columns, ids_of
from precompute.adapters.torch_export import PARITY_TOLERANCE, Example, first_line
from precompute.adapters.torch_towers import from_torch
from precompute.adapters.vectors import NO_NEW_ITEM, import_vectors

_COMPARED = 3
_EXAMPLES = 64


def from_recbole(
    model: Any, dataset: Any, *, to: str | Path, clicks: Any = None, seed: int = 0
) -> ImportReport:
    """Make a folder of a fitted model of RecBole and its dataset, whose tokens are the ids; row 0, padding, is dropped.

    A general recommender gives vectors of users and items (BPR, LightGCN and others whose scores are their products), a
    sequential one (SASRec, GRU4Rec) becomes the user tower. `clicks` (default: the dataset's) are those of
    `from_vectors`. Raises SourceError for a model that scores otherwise.
    """
    users, items = (
        dataset.field2id_token[field][1:].tolist()
        for field in (dataset.uid_field, dataset.iid_field)
    )
    if clicks is None:
        interactions = dataset.inter_feat
        row, column = (
            np.asarray(interactions[id_field]) - 1
            for id_field in (dataset.uid_field, dataset.iid_field)
        )
        has_times = dataset.time_field in interactions.columns
        time = np.asarray(interactions[dataset.time_field]) if has_times else np.zeros(len(row))
        history_field = getattr(dataset, f"{dataset.iid_field}_list_field", None)
        if history_field in interactions.columns:
            # Of a sequential dataset that is prepared, a user's first item is only in the history of the second.
            second = np.asarray(interactions[dataset.item_list_length_field]) == 1
            column = np.concatenate(
                [np.asarray(interactions[history_field])[second, 0] - 1, column]
            )
            row, time = (
                np.concatenate([column_values[second], column_values])
                for column_values in (row, time)
            )
        clicks = ClickMatrix.in_order(row, column, time, ids_of(users, "user"), len(items))
    model = model.cpu().eval()
    name = f"RecBole {type(model).__name__}"
    if hasattr(model, "max_seq_length"):
        table = model.item_embedding.weight.detach()
        longest = int(model.max_seq_length)
        example = Example(
            {"history": torch.ones(2, longest, dtype=torch.int64)}, {"item": torch.tensor([0, 1])},
            pad=0, max_length=longest, first_item=1,
        )  # fmt: skip
        user_tower, item_tower = _Sequential(model), nn.Embedding.from_pretrained(table)
        return from_torch(
            user_tower.eval(), item_tower.eval(), example, to=to, item_ids=items, user_ids=users, clicks=clicks,
            name=name, seed=seed,
        )  # fmt: skip
    of_users, of_items = _factors(model)
    kept_users, kept_items = (
        Vectors.of(users, of_users[1:], "user"),
        Vectors.of(items, of_items[1:], "item"),
    )
    return import_vectors(
        Path(to), kept_items, kept_users, ClickMatrix.of(clicks, kept_users.ids, kept_items.ids), model=name,
        cannot=[NO_NEW_ITEM], seed=seed,
    )  # fmt: skip


def from_rechub(
    model: Any,
    *,
    to: str | Path,
    item_ids: Any,
    item: str,
    history: str | None = None,
    user: str | None = None,
    user_ids: Any = None,
    clicks: Any = None,
    item_features: Any = None,
    user_features: Any = None,
    max_length: int = 50,
    first: int = 1,
    seed: int = 0,
) -> ImportReport:
    """Make a folder of a fitted two-tower of torch-rechub (DSSM, YoutubeDNN and others with `mode`).

    `item`, `history` and `user` name the features that hold an item's index, the history of those and a user's index;
    indices start at `first`, and 0 is padding. All other features need a row for each id. Scores are products of the
    towers' vectors.
    """
    names = {"item": item, "history": history, "user": user}
    item_features = feature_columns(item_features, ids_of(item_ids, "item"), "item")
    users = None if user_ids is None else ids_of(user_ids, "user")
    user_features = feature_columns(user_features, users, "user")
    features_by_mode = {"user": user_features, "item": item_features}
    towers, inputs = {}, {}
    for mode in ("user", "item"):
        features = [*getattr(model, f"{mode}_features", [])]
        features += getattr(model, "history_features", []) if mode == "user" else []
        input_names = list(dict.fromkeys(feature.name for feature in features))
        bound = {
            next((key for key, name in names.items() if name == input_name), input_name): input_name
            for input_name in input_names
        }
        inputs[mode] = {
            key: _example(key, name, features_by_mode[mode], mode) for key, name in bound.items()
        }
        towers[mode] = _Mode(model, mode, list(bound.values())).cpu().eval()
    example = Example(
        inputs["user"],
        inputs["item"],
        pad=0,
        max_length=max_length,
        first_item=first,
        first_user=first,
    )
    return from_torch(
        towers["user"], towers["item"], example, to=to, item_ids=item_ids, user_ids=user_ids, clicks=clicks,
        item_features=item_features, user_features=user_features, name=f"torch-rechub {type(model).__name__}",
        seed=seed,
    )  # fmt: skip


def from_sentence_transformer(
    model: Any,
    item_ids: Any,
    texts: Sequence[str],
    *,
    to: str | Path,
    clicks: Any = None,
    metric: Metric = "cosine",
    seed: int = 0,
) -> ImportReport:
    """Make a folder of items' texts, encoded to vectors of length 1; a history is folded as by `from_vectors`."""
    items = ids_of(item_ids, "item")
    if len(texts) != len(items):
        raise SourceError(
            f"{len(texts):,} texts, but {len(items):,} item ids: give one text for each id, in their order"
        )
    rows = model.encode(list(texts), normalize_embeddings=True, convert_to_numpy=True)
    return import_vectors(
        Path(to), Vectors.of(items, rows, "item"), None,
        None if clicks is None else ClickMatrix.of(clicks, None, items), metric=metric,
        model=f"sentence-transformers {type(model).__name__}",
        cannot=["encode the text of an item that comes later: import again"], seed=seed,
    )  # fmt: skip


class _Sequential(nn.Module):  # type: ignore[misc]  # torch's own types are not looked at
    """Sequential recommender of RecBole, as a tower of histories alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, history: Tensor) -> Tensor:
        return self.model(history, (history != 0).sum(1).clamp(min=1))


class _Mode(nn.Module):  # type: ignore[misc]
    """Tower of a model of torch-rechub, its inputs by place instead of by name."""

    def __init__(self, model: Any, mode: str, names: Sequence[str]) -> None:
        super().__init__()
        self.model = copy.copy(model)  # the weights are shared, the mode is not
        self.model.mode = mode
        self.names = list(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(dict(zip(self.names, inputs, strict=True)))


def _example(key: str, name: str, feature_arrays: Mapping[str, Any], entity_kind: str) -> Tensor:
    if key == "history":
        return torch.ones(2, 2, dtype=torch.int64)
    if key in ("item", "user"):
        return torch.tensor([0, 1])
    if name not in feature_arrays:
        raise SourceError(
            f"the {entity_kind} tower takes {name!r}: name it as item, history or user, or give it in "
            f"{entity_kind}_features"
        )
    tensor = torch.as_tensor(np.asarray(feature_arrays[name])[:_EXAMPLES])
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _factors(model: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(users, items) of a general recommender, padding included; SourceError unless it scores by their products."""
    name = type(model).__name__
    try:
        with torch.no_grad():
            if hasattr(model, "norm_adj_matrix"):  # of a graph, which gives all at once
                users, items = model.forward()[:2]
            else:
                users, items = model.user_embedding.weight, model.item_embedding.weight
            user_indices = torch.arange(1, min(len(users), 1 + _COMPARED))
            scores = model.full_sort_predict({model.USER_ID: user_indices}).view(
                len(user_indices), -1
            )
            off = float((users[user_indices] @ items.T - scores).abs().max() / scores.abs().max())
    except Exception as error:  # whatever the model's own code raises
        raise SourceError(
            f"RecBole's {name} gives no vectors of users and items ({first_line(error)}): import a model "
            "like BPR, LightGCN or SASRec"
        ) from None
    if not off <= PARITY_TOLERANCE:
        raise SourceError(
            f"RecBole's {name} scores by something else than products of its embeddings (off by {off:.1g}): only "
            "such models become vectors, like BPR and LightGCN"
        )
    return users.numpy(force=True), items.numpy(force=True)
