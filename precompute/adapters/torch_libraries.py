"""Import of models of libraries on torch: RecBole, torch-rechub, sentence-transformers.

The libraries are not imported: only attributes of their models are used.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cache.config.night import Sources
from cache.errors import SourceError
from cache.model.ranking import Metric
from precompute.adapters.folder import ImportReport
from precompute.adapters.inputs import ClickMatrix, EntityVectors, checked_ids, feature_columns
from precompute.adapters.torch_export import PARITY_TOLERANCE, Example, first_message_line
from precompute.adapters.torch_towers import from_torch
from precompute.adapters.vectors import NO_NEW_ITEM_LIMIT, import_vectors

_COMPARED_USERS_MAX = 3
_EXAMPLE_ROWS_MAX = 64


def from_recbole(model: Any, dataset: Any, *, to: str | Path, clicks: Any = None, seed: int = 0) -> ImportReport:
    """Make a folder from a fitted RecBole model and its dataset, whose tokens are the ids; row 0, padding, is left out.

    A general recommender (BPR, LightGCN and others whose scores are inner products) gives vectors of users and items; a
    sequential one (SASRec, GRU4Rec) becomes the user tower. `clicks` (default: the dataset's) are those of
    `from_vectors`. Raises SourceError for a model that scores in another way.
    """
    user_tokens, item_tokens = (
        dataset.field2id_token[field][1:].tolist() for field in (dataset.uid_field, dataset.iid_field)
    )
    if clicks is None:
        interactions = dataset.inter_feat
        user_rows, item_columns = (
            np.asarray(interactions[id_field]) - 1 for id_field in (dataset.uid_field, dataset.iid_field)
        )
        has_times = dataset.time_field in interactions.columns
        click_times = np.asarray(interactions[dataset.time_field]) if has_times else np.zeros(len(user_rows))
        history_field = getattr(dataset, f"{dataset.iid_field}_list_field", None)
        if history_field in interactions.columns:
            # In a prepared sequential dataset a user's first item only occurs in the history of the second one.
            is_second_click = np.asarray(interactions[dataset.item_list_length_field]) == 1
            item_columns = np.concatenate(
                [np.asarray(interactions[history_field])[is_second_click, 0] - 1, item_columns]
            )
            user_rows, click_times = (
                np.concatenate([column_values[is_second_click], column_values])
                for column_values in (user_rows, click_times)
            )
        clicks = ClickMatrix.in_order(
            user_rows, item_columns, click_times, checked_ids(user_tokens, "user"), len(item_tokens)
        )
    model = model.cpu().eval()
    model_title = f"RecBole {type(model).__name__}"
    if hasattr(model, "max_seq_length"):
        item_table = model.item_embedding.weight.detach()
        history_items_max = int(model.max_seq_length)
        example = Example(
            {"history": torch.ones(2, history_items_max, dtype=torch.int64)}, {"item": torch.tensor([0, 1])},
            pad=0, max_length=history_items_max, first_item=1,
        )  # fmt: skip
        user_tower, item_tower = (_RecBoleHistoryTower(model), nn.Embedding.from_pretrained(item_table))
        return from_torch(
            user_tower.eval(), item_tower.eval(), example, to=to, item_ids=item_tokens, user_ids=user_tokens,
            clicks=clicks,
            name=model_title, seed=seed,
        )  # fmt: skip
    user_factors, item_factors = _user_and_item_factors(model)
    user_vectors, item_vectors = (
        EntityVectors.of(user_tokens, user_factors[1:], "user"),
        EntityVectors.of(item_tokens, item_factors[1:], "item"),
    )
    return import_vectors(
        Path(to), item_vectors, user_vectors, ClickMatrix.of(clicks, user_vectors.entity_ids, item_vectors.entity_ids),
        model_title=model_title,
        model_limit_texts=[NO_NEW_ITEM_LIMIT], seed=seed,
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
    """Make a folder from a fitted two-tower model of torch-rechub (DSSM, YoutubeDNN and others with `mode`).

    `item`, `history` and `user` name the features with an item's index, the history of such indices and a user's index;
    indices start at `first`, and 0 is padding. All other features need a row for each id. Scores are inner products of
    the towers' vectors.
    """
    feature_by_role = {"item": item, "history": history, "user": user}
    sources = clicks if isinstance(clicks, Sources) else None
    item_features, item_limits = feature_columns(item_features, checked_ids(item_ids, "item"), "item", sources)
    checked_user_ids = None if user_ids is None else checked_ids(user_ids, "user")
    user_features, user_limits = feature_columns(user_features, checked_user_ids, "user", sources)
    features_by_mode = {"user": user_features, "item": item_features}
    tower_by_mode, examples_by_mode = {}, {}
    for mode in ("user", "item"):
        mode_features = [*getattr(model, f"{mode}_features", [])]
        mode_features += getattr(model, "history_features", []) if mode == "user" else []
        input_names = list(dict.fromkeys(feature.name for feature in mode_features))
        feature_by_input = {
            next(
                (key for key, feature_name in feature_by_role.items() if feature_name == input_name), input_name
            ): input_name
            for input_name in input_names
        }
        examples_by_mode[mode] = {
            key: _example_tensor(key, feature_name, features_by_mode[mode], mode)
            for key, feature_name in feature_by_input.items()
        }
        tower_by_mode[mode] = _RechubTower(model, mode, list(feature_by_input.values())).cpu().eval()
    example = Example(
        examples_by_mode["user"],
        examples_by_mode["item"],
        pad=0,
        max_length=max_length,
        first_item=first,
        first_user=first,
    )
    return from_torch(
        tower_by_mode["user"], tower_by_mode["item"], example, to=to, item_ids=item_ids, user_ids=user_ids,
        clicks=clicks,
        item_features=item_features, user_features=user_features, name=f"torch-rechub {type(model).__name__}",
        cannot=(*item_limits, *user_limits), seed=seed,
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
    """Make a folder of items' texts, encoded to vectors of length 1; histories are used as in `from_vectors`."""
    checked_item_ids = checked_ids(item_ids, "item")
    if len(texts) != len(checked_item_ids):
        raise SourceError(
            f"{len(texts):,} texts, but {len(checked_item_ids):,} item ids: give one text for each id, in the order of "
            "the ids"
        )
    text_vectors = model.encode(list(texts), normalize_embeddings=True, convert_to_numpy=True)
    return import_vectors(
        Path(to), EntityVectors.of(checked_item_ids, text_vectors, "item"), None,
        None if clicks is None else ClickMatrix.of(clicks, None, checked_item_ids), metric=metric,
        model_title=f"sentence-transformers {type(model).__name__}",
        model_limit_texts=["encode the text of a later item: repeat the import then"], seed=seed,
    )  # fmt: skip


class _RecBoleHistoryTower(nn.Module):  # type: ignore[misc]  # torch's own types are not looked at
    """Sequential recommender of RecBole, as a tower that only takes histories."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, history: Tensor) -> Tensor:
        return self.model(history, (history != 0).sum(1).clamp(min=1))


class _RechubTower(nn.Module):  # type: ignore[misc]
    """Tower of a torch-rechub model with its inputs by position instead of by name."""

    def __init__(self, model: Any, tower_mode: str, input_names: Sequence[str]) -> None:
        super().__init__()
        self.model = copy.copy(model)  # the copies share the weights, but not the mode
        self.model.mode = tower_mode
        self.names = list(input_names)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(dict(zip(self.names, inputs, strict=True)))


def _example_tensor(input_name: str, feature_name: str, feature_arrays: Mapping[str, Any], entity_kind: str) -> Tensor:
    if input_name == "history":
        return torch.ones(2, 2, dtype=torch.int64)
    if input_name in ("item", "user"):
        return torch.tensor([0, 1])
    if feature_name not in feature_arrays:
        raise SourceError(
            f"the {entity_kind} tower takes {feature_name!r}: name it as item, history or user, or give it in "
            f"{entity_kind}_features"
        )
    tensor = torch.as_tensor(np.asarray(feature_arrays[feature_name])[:_EXAMPLE_ROWS_MAX])
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _user_and_item_factors(model: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (user, item) factors of a recommender, with padding; raise SourceError unless they give its scores."""
    model_name = type(model).__name__
    try:
        with torch.no_grad():
            if hasattr(model, "norm_adj_matrix"):  # a graph model, which returns all vectors at once
                user_factors, item_factors = model.forward()[:2]
            else:
                user_factors, item_factors = (model.user_embedding.weight, model.item_embedding.weight)
            user_indices = torch.arange(1, min(len(user_factors), 1 + _COMPARED_USERS_MAX))
            scores = model.full_sort_predict({model.USER_ID: user_indices}).view(len(user_indices), -1)
            relative_error = float(
                (user_factors[user_indices] @ item_factors.T - scores).abs().max() / scores.abs().max()
            )
    except Exception as error:  # the model's code may raise any exception
        raise SourceError(
            f"RecBole's {model_name} gives no vectors of users and items ({first_message_line(error)}): import a model "
            "like BPR, LightGCN or SASRec"
        ) from None
    if not relative_error <= PARITY_TOLERANCE:
        raise SourceError(
            f"RecBole's {model_name} does not score by inner products of its embeddings (relative error "
            f"{relative_error:.1g}): import a model that does, like BPR or LightGCN"
        )
    return user_factors.numpy(force=True), item_factors.numpy(force=True)
