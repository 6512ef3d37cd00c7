"""Models of RecBole and torch-rechub, fitted by these, and a tiny random encoder of sentence-transformers."""

import sys
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from precompute.adapters.torch_libraries import from_recbole, from_rechub, from_sentence_transformer
from tests.bench.fitted.cut import GENRES, ITEMS, USERS, Cut
from tests.bench.fitted.fitted import Fitted

DIMS, LENGTH, BATCH = 32, 50, 256


def pairs(cut: Cut) -> Fitted:
    """BPR of RecBole."""
    return _recbole("BPR", cut, {"embedding_size": DIMS, "epochs": 30})


def sas_rec(cut: Cut) -> Fitted:
    """SASRec of RecBole, by next items."""
    return _recbole(
        "SASRec",
        cut,
        {
            "hidden_size": DIMS, "inner_size": 2 * DIMS, "n_layers": 1, "epochs": 3,
            "train_neg_sample_args": None, "MAX_ITEM_LIST_LENGTH": LENGTH,
        },
    )  # fmt: skip


def _recbole(name: str, cut: Cut, more: dict[str, Any]) -> Fitted:
    for old, new in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        setattr(np, old, new)  # RecBole 1.2.1 asks for names that NumPy 2 has not
    recbole = {module_name: import_module(f"recbole.{module_name}") for module_name in ("config", "data", "utils")}
    with TemporaryDirectory() as folder, chdir(folder):  # it writes its logs where it stands
        lines = (f"{user}\t{item}\t{time}\n" for user, item, time in cut.rows())
        path = Path(folder) / "drawn" / "drawn.inter"
        path.parent.mkdir()
        path.write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(lines))
        config_values = {
            "data_path": folder, "checkpoint_dir": folder, "seed": 0, "use_gpu": False,
            "show_progress": False, "state": "ERROR", "learning_rate": 5e-3,
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "eval_args": {"split": {"RS": [1, 0, 0]}, "order": "TO", "group_by": "user", "mode": "full"},
            **more,
        }  # fmt: skip
        sys.argv = sys.argv[:1]  # RecBole takes settings from there, too
        config = recbole["config"].Config(model=name, dataset="drawn", config_dict=config_values)
        recbole["utils"].init_seed(0, True)
        dataset = recbole["data"].create_dataset(config)
        loader = recbole["data"].data_preparation(config, dataset)[0]
        model = recbole["utils"].get_model(name)(config, loader.dataset)
        kind = recbole["utils"].get_trainer(config["MODEL_TYPE"], name)
        kind(config, model).fit(loader, saved=False, show_progress=False)
    model.eval()
    users, items = (dataset.field2id_token[field].tolist() for field in (dataset.uid_field, dataset.iid_field))
    column = {int(token): token_index for token_index, token in enumerate(items) if token_index}
    row = {int(token): token_index for token_index, token in enumerate(users) if token_index}

    def lists() -> Any:
        with torch.no_grad():
            if hasattr(model, "max_seq_length"):
                item_sequences = np.zeros((len(cut.evaluated_users), LENGTH), np.int64)
                for row_index, user in enumerate(cut.evaluated_users):
                    last = [column[int(item)] for item in cut.histories[user][-LENGTH:]]
                    item_sequences[row_index, : len(last)] = last
                model_input = {
                    model.ITEM_SEQ: torch.from_numpy(item_sequences),
                    model.ITEM_SEQ_LEN: torch.from_numpy((item_sequences != 0).sum(axis=1)),
                }
            else:
                model_input = {model.USER_ID: torch.tensor([row[int(user)] for user in cut.evaluated_users])}
            scores = model.full_sort_predict(model_input).view(len(cut.evaluated_users), -1).numpy()
        item_scores = np.full((len(cut.evaluated_users), ITEMS), -np.inf)
        item_scores[:, list(column)] = scores[:, list(column.values())]
        return cut.rank_items(item_scores)

    return Fitted(lambda to: from_recbole(model, dataset, to=to), lists)


def youtube(cut: Cut) -> Fitted:
    """YoutubeDNN of torch-rechub: the mean of a history through two layers, beside 20 other items."""
    rechub = {
        module_name: import_module(f"torch_rechub.{module_name}")
        for module_name in ("basic.features", "models.matching", "trainers")
    }
    sequence = rechub["basic.features"].SequenceFeature
    item = rechub["basic.features"].SparseFeature("item", vocab_size=ITEMS + 1, embed_dim=DIMS, padding_idx=0)
    shared = {"vocab_size": ITEMS + 1, "embed_dim": DIMS, "shared_with": "item", "padding_idx": 0}
    torch.manual_seed(0)
    model = rechub["models.matching"].YoutubeDNN(
        [sequence("history", pooling="mean", **shared)],
        [item],
        [sequence("others", pooling="concat", **shared)],
        {"dims": [2 * DIMS, DIMS], "activation": "relu"},
        temperature=0.1,
    )
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), [len(history) for history in cut.histories])
    order = rng.permutation(len(users))
    liked, histories = np.concatenate(cut.histories) + 1, cut.padded(users, LENGTH, 0, first=1)
    batches = [
        (
            {
                "history": torch.from_numpy(histories[batch_rows]),
                "item": torch.from_numpy(liked[batch_rows]),
                "others": torch.from_numpy(rng.integers(1, ITEMS + 1, (len(batch_rows), 20))),
            },
            torch.zeros(len(batch_rows), dtype=torch.int64),
        )
        for batch_rows in np.array_split(order, len(order) // 1_024)
    ]
    trainer = rechub["trainers"].MatchTrainer(model, mode=2, optimizer_params={"lr": 5e-3, "weight_decay": 1e-6})
    for _ in range(5):
        trainer.train_one_epoch(batches)

    def lists() -> Any:
        model.eval()
        history = torch.from_numpy(cut.padded(cut.evaluated_users, LENGTH, 0, first=1))
        with torch.no_grad():
            model.mode = "user"
            of_users = model({"history": history})
            model.mode = "item"
            of_items = model({"item": torch.arange(1, ITEMS + 1)})
        return cut.rank_items((of_users @ of_items.T).numpy())

    def put(to: Path) -> Any:
        with TemporaryDirectory() as folder:
            clicks = cut.write(Path(folder) / "clicks.csv")
            return from_rechub(
                model, to=to, item_ids=range(ITEMS), item="item", history="history", clicks=clicks,
                max_length=LENGTH,
            )  # fmt: skip

    return Fitted(put, lists)


def sentences(cut: Cut) -> Fitted:
    """Texts of an item's genre and number, by the mean of random vectors of words."""
    library = import_module("sentence_transformers")
    parts = import_module("sentence_transformers.models")
    torch.manual_seed(0)
    vocabulary = [*GENRES, *map(str, range(ITEMS))]
    tokenizer = parts.tokenizer.WhitespaceTokenizer(vocabulary, stop_words=())
    weights = np.random.default_rng(0).normal(size=(len(vocabulary) + 1, DIMS)).astype(np.float32)
    embedding = parts.WordEmbeddings(tokenizer, weights)
    model = library.SentenceTransformer(modules=[embedding, parts.Pooling(DIMS)], device="cpu")
    texts = [f"{GENRES[genre]} {item}" for item, genre in enumerate(cut.genres)]

    def lists() -> Any:
        rows = model.encode(texts, normalize_embeddings=True, convert_to_numpy=True)
        means = cut.matrix[cut.evaluated_users] @ rows
        return cut.rank_items(means @ rows.T)

    return Fitted(lambda to: from_sentence_transformer(model, range(ITEMS), texts, to=to, clicks=cut.matrix), lists)
