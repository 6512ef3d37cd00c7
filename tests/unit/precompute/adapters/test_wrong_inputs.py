"""Ten wrong inputs, each refused in the words of the page about them: what is wrong, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import orjson
import pytest
import scipy.sparse as sp

from cache.errors import LarderError
from cache.store.artefacts import sha256_of
from infra.cli.__main__ import EXIT_USAGE, main
from precompute.adapters.factorisations import from_implicit
from precompute.adapters.vectors import from_vectors
from precompute.bundles.bundle import Bundle
from tests.models import train_small
from tests.unit.precompute.adapters.written import taste_clicks
from tests.unit.test_layering import ROOT

PAGE = ROOT / "docs/how-to/import/index.md"
CLICKS = taste_clicks()
LEFT_VECTORS, VALUES, RIGHT = np.linalg.svd(CLICKS.toarray(), full_matrices=False)
USERS = (LEFT_VECTORS[:, :6] * VALUES[:6]).astype(np.float32)
ITEMS = np.ascontiguousarray(RIGHT[:6].T)
IDS = [f"i{n}" for n in range(80)]


class Wrong(NamedTuple):
    """A wrong input in the current folder: its import into `out`, and the words of `larder import` for that."""

    imported: Callable[[], Any]
    command_arguments: tuple[str, ...] = ()


def vectors(items: Any = ITEMS, users: Any = USERS, ids: list[str] = IDS) -> Wrong:
    np.save("items.npy", items, allow_pickle=True)
    np.save("users.npy", users)
    sp.save_npz("clicks.npz", CLICKS)
    Path("ids.txt").write_text("\n".join(ids), encoding="utf-8")
    command_line = "vectors --items items.npy --users users.npy --clicks clicks.npz --item-ids ids.txt --to out"
    return Wrong(
        lambda: from_vectors("ids.txt", "items.npy", None, "users.npy", clicks="clicks.npz", to="out"),
        tuple(command_line.split()),
    )


def shuffled() -> Wrong:
    return vectors(users=USERS[np.random.default_rng(0).permutation(120)])


def not_a_number() -> Wrong:
    items = ITEMS.copy()
    items[3, 2] = np.nan
    return vectors(items)


def unfitted() -> Wrong:
    np.savez("als.npz", regularization=0.1, alpha=1.0)
    sp.save_npz("clicks.npz", CLICKS)
    return Wrong(
        lambda: from_implicit("als.npz", "clicks.npz", to="out"),
        ("implicit", "als.npz", "--clicks", "clicks.npz", "--to", "out"),
    )


def frozen() -> Wrong:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from precompute.adapters.torch_towers import from_torch
    from tests.unit.precompute.adapters import torch_examples as towers

    class FrozenRows(towers.Mean):
        def forward(self, history):
            rows = int(history.shape[0])
            return self.table(history).sum(1) + torch.zeros(rows, towers.DIMS)

    users, items = FrozenRows().eval(), towers.Items().eval()
    ids = range(towers.ITEMS)
    return Wrong(lambda: from_torch(users, items, towers.example(), to="out", item_ids=ids))


def unlisted() -> Wrong:
    """A model whose weights are in files of their own, as any size of them may be saved."""
    bundle = train_small(Path("bundle"))
    path = bundle.user_tower.path
    model = onnx.load(path)
    for number, tensor in enumerate(model.graph.initializer):
        onnx.external_data_helper.set_external_data(tensor, f"table.{number}")
    onnx.save(model, path)
    bundle_json = orjson.loads((bundle.path / "bundle.json").read_bytes())
    bundle_json["user_tower"]["sha256"] = sha256_of(path)
    (bundle.path / "bundle.json").write_bytes(orjson.dumps(bundle_json))
    return Wrong(lambda: Bundle.open(bundle.path))


WRONG: dict[str, Callable[[], Wrong]] = {
    "shuffled ids": shuffled,
    "wrong dimensions": lambda: vectors(users=USERS[:, :5]),
    "NaN": not_a_number,
    "frozen batch": frozen,
    "half precision": lambda: vectors(ITEMS.astype(np.float16)),
    "missing item": lambda: vectors(ids=IDS[:79]),
    "pickles": lambda: vectors(np.array([{"a": 1}], dtype=object)),
    "duplicate ids": lambda: vectors(ids=[*IDS[:79], "i7"]),
    "unfitted model": unfitted,
    "3 GiB of weights in files that nobody listed": unlisted,
}

NO_FILE = {"frozen batch", "3 GiB of weights in files that nobody listed"}
"""Wrong inputs that `larder import` cannot be given."""


def read_documented_messages() -> dict[str, str]:
    """Messages by wrong input, as the table of the page has them."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## When an import is refused\n")[2]
    lines = section.partition("|---|---|---|\n")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {name: f"{problem}: {remedy}" for name, problem, remedy in cells}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_page_has_every_wrong_input():
    assert list(read_documented_messages()) == list(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_in_one_line_that_names_the_remedy_and_nothing_is_written(name, tmp_path):
    wrong = WRONG[name]()

    with pytest.raises(LarderError) as error:
        wrong.imported()

    assert error.value.message == read_documented_messages()[name]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in WRONG if name not in NO_FILE])
def test_larder_import_says_the_same(name, tmp_path, capsys):
    wrong = WRONG[name]()
    files_before = sorted(tmp_path.iterdir())

    code = main(["import", *wrong.command_arguments])

    stdout, err = capsys.readouterr()
    assert (code, stdout, err) == (EXIT_USAGE, "", f"larder: {read_documented_messages()[name]}\n")
    assert sorted(tmp_path.iterdir()) == files_before


def test_what_is_right_is_imported():
    assert main(["import", *vectors().command_arguments]) == 0
