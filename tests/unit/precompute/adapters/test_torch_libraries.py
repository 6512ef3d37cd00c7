"""Models of libraries on torch, by stand-ins with their attributes: ids, padding and scores stay theirs."""
# ruff: noqa: E402 - torch may not be there

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn

from cache.errors import SourceError
from cache.model.tower import Histories, Tower
from precompute.adapters import torch_libraries
from precompute.adapters.torch_libraries import from_recbole, from_rechub, from_sentence_transformer
from precompute.bundles.bundle import Bundle

USERS, ITEMS = 4, 6
TOKENS = {"user": np.array(["[PAD]", *"abcd"]), "item": np.array(["[PAD]", *(f"i{row}" for row in range(ITEMS))])}


class Feat(dict[str, Any]):
    @property
    def columns(self) -> list[str]:
        return list(self)


class Factors(nn.Module):  # type: ignore[misc]
    """Recommender whose users like the items of their own number."""

    USER_ID = "user"

    def __init__(self, bias: float = 0) -> None:
        super().__init__()
        self.user_embedding = nn.Embedding.from_pretrained(torch.eye(USERS + 1, 8))
        self.item_embedding = nn.Embedding.from_pretrained(torch.eye(ITEMS + 1, 8))
        self.bias = bias

    def full_sort_predict(self, batch):
        scores = self.user_embedding(batch["user"]) @ self.item_embedding.weight.T
        return (scores + self.bias).view(-1)


class TwoTowers(nn.Module):  # type: ignore[misc]
    """Like torch-rechub's: both towers in one module, told apart by `mode`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS + 1, 8, padding_idx=0)
        self.user_features = [SimpleNamespace(name="hist"), SimpleNamespace(name="age")]
        self.item_features = [SimpleNamespace(name="movie")]
        self.mode = None

    def forward(self, x):
        if self.mode == "item":
            return self.table(x["movie"])
        return self.table(x["hist"]).sum(1) + x["age"].unsqueeze(1)


def run(folder, name, **inputs):
    model = getattr(Bundle.open(folder / "bundle"), name)
    return Tower.open(model.path, model.spec).run(inputs)


def dataset(users, items, times):
    return SimpleNamespace(
        uid_field="user",
        iid_field="item",
        time_field="time",
        field2id_token=TOKENS,
        inter_feat=Feat(user=users, item=items, time=times),
    )


def test_a_general_recommender_loses_its_padding_and_keeps_its_tokens(tmp_path):
    recbole_dataset = dataset([1, 2, 3, 4], [1, 2, 3, 4], [9, 8, 7, 6])

    from_recbole(Factors(), recbole_dataset, to=tmp_path)

    table = pq.read_table(tmp_path / "user_vectors.parquet")
    assert table["user"].to_pylist() == ["a", "b", "c", "d"]
    assert np.array(table["vector"].to_pylist()).argmax(axis=1).tolist() == [1, 2, 3, 4]
    assert run(tmp_path, "item_tower", item_index=np.arange(ITEMS)).argmax(axis=1)[0] == 1
    assert pq.read_table(tmp_path / "clicks.parquet")["item"].to_pylist() == ["i0", "i1", "i2", "i3"]


def test_the_first_item_of_a_sequential_dataset_that_is_prepared_is_in_the_history_of_the_second(tmp_path, monkeypatch):
    caught = []
    monkeypatch.setattr(torch_libraries, "import_vectors", lambda *given, **_: caught.extend(given))
    recbole_dataset = dataset([1, 1, 2], [2, 3, 4], [5, 6, 5])
    recbole_dataset.item_list_field, recbole_dataset.item_list_length_field = "item_list", "length"
    recbole_dataset.inter_feat |= {"item_list": np.array([[1, 0], [1, 2], [3, 0]]), "length": [1, 2, 1]}

    from_recbole(Factors(), recbole_dataset, to=tmp_path)

    clicks = caught[3].matrix
    assert clicks.indptr.tolist()[:3] == [0, 3, 5] and clicks.indices.tolist() == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("model", "message_pattern"),
    [
        (Factors(bias=1.0), "does not score by inner products of its embeddings"),
        (nn.Linear(2, 2), "gives no vectors of users and items"),
    ],
)
def test_a_recommender_that_scores_otherwise_is_refused(model, message_pattern, tmp_path):
    with pytest.raises(SourceError, match=message_pattern):
        from_recbole(model, dataset([1], [1], [1]), to=tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_two_towers_in_one_module_are_distinguished_by_their_mode(tmp_path):
    model, ids = TwoTowers(), [f"m{row}" for row in range(ITEMS)]
    ages = {"age": np.array([1.0, 2.0], np.float32)}

    from_rechub(
        model, to=tmp_path, item_ids=ids, item="movie", history="hist", user_ids=["a", "b"],
        user_features=ages,
    )  # fmt: skip

    rows = model.table.weight.detach().numpy()
    assert model.mode is None
    np.testing.assert_array_equal(run(tmp_path, "item_tower", item=np.arange(ITEMS)), rows[1:])
    user_vectors = run(tmp_path, "user_tower", history=Histories.of([[0, 5], []]), **ages)
    np.testing.assert_allclose(user_vectors, [rows[1] + rows[6] + 1, np.full(8, 2.0)], rtol=1e-6)


def test_a_feature_that_nothing_is_given_for_is_named(tmp_path):
    with pytest.raises(SourceError, match="the user tower takes 'age': name it as item, history or user"):
        from_rechub(TwoTowers(), to=tmp_path / "out", item_ids=["m"], item="movie", history="hist")


def test_texts_become_vectors_and_every_text_needs_an_id(tmp_path):
    encoder = SimpleNamespace(encode=lambda texts, **_: np.eye(3, dtype=np.float32)[: len(texts)])

    report = from_sentence_transformer(encoder, ["a", "b"], ["red", "blue"], to=tmp_path / "out")

    assert (report.items, report.metric, report.fold_in) == (2, "cosine", "mean")
    with pytest.raises(SourceError, match="2 texts, but 1 item ids: give one text for each id"):
        from_sentence_transformer(encoder, ["a"], ["red", "blue"], to=tmp_path / "other")
