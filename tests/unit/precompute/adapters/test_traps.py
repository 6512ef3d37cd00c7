"""Traps of an export: each is refused in one line that names the remedy, before anything is written."""
# ruff: noqa: E402 - torch may not be there

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn

from cache.errors import BundleError, LarderError, SourceError
from precompute.adapters import torch_export
from precompute.adapters.torch_export import Example, export_tower
from precompute.adapters.torch_towers import from_torch
from tests.unit.precompute.adapters import torch_examples as towers
from tests.unit.precompute.adapters.torch_examples import HISTORY, INDEX, ITEMS, bound, example


class FrozenLength(towers.Mean):
    def forward(self, history):
        return sum(self.table(history[:, position]) for position in range(history.shape[1]))


class Twice(towers.Mean):
    """A vector that the padding behind a history is a part of."""

    def forward(self, history):
        return self.table(history).mean(1)


class Wide(towers.Mean):
    def forward(self, history):
        return self.table(history)


class TwoOutputs(towers.Mean):
    def forward(self, history):
        return super().forward(history), history


class Nan(towers.Mean):
    def forward(self, history):
        return super().forward(history) * float("nan")


class Unknown(towers.Mean):
    def forward(self, history):
        return super().forward(history).kthvalue(1, dim=1, keepdim=True)[0]


class ByValue(towers.Mean):
    def forward(self, history):
        return super().forward(history) * (2 if history.sum() > 3 else 1)


class Tiny(towers.Mean):
    """Larger than torch says by more than any rounding, but only where a history is full."""

    def forward(self, history):
        longer = 1.001 if not torch.compiler.is_exporting() else 1.0
        return super().forward(history) * longer


def refused(kind, error, remedy):
    with pytest.raises(error, match=re.escape(remedy)) as raised:
        export_tower(bound(kind()))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (Twice, "mask the padding in forward, or set is_fixed=True in Example"),
        (Wide, "whose forward returns one vector for each row"),
        (TwoOutputs, "whose forward returns one vector for each row"),
        (Nan, "does forward mask padding without a division by 0?"),
    ],
)
def test_what_torch_itself_says_is_no_vector(kind, remedy):
    refused(kind, SourceError, remedy)


def test_a_frozen_length_is_named():
    refused(FrozenLength, BundleError, "input 'history' has axis 1 (length) frozen at 15: take sizes from tensors")


def test_an_operator_without_onnx_is_named():
    refused(Unknown, BundleError, "uses aten.kthvalue, which ONNX does not have: write forward with other operators")


def test_a_decision_by_values_is_named():
    refused(ByValue, BundleError, "forward must not branch on values of its inputs")


def test_a_model_that_differs_is_refused():
    refused(Tiny, BundleError, "(1e-05 is allowed): forward must not branch on Python numbers")


def test_a_fixed_length_is_what_a_frozen_tower_may_have():
    export_example = Example({"history": HISTORY}, {"item": INDEX}, pad=ITEMS, max_length=12, is_fixed=True)

    _, spec, worst = export_tower(bound(FrozenLength(), export_example))

    assert worst <= torch_export.PARITY_TOLERANCE and spec.inputs[0].max_length == 12


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        (towers.Mean(), "call .eval() on it"),
        (towers.Mean().eval().half(), "call .float() on it"),
        (towers.Mean().eval().bfloat16(), "call .float() on it"),
        (towers.Mean().eval().double(), "call .float() on it"),
        (towers.Mean().eval().to("meta"), "call .cpu() on it"),
        (towers.Mean().state_dict(), "give an nn.Module whose forward returns vectors"),
    ],
)
def test_a_module_that_is_not_ready_is_refused(module, remedy):
    with pytest.raises(SourceError, match=re.escape(remedy)) as raised:
        torch_export.demand_exportable(module, "the user tower")
    assert "\n" not in raised.value.message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused():
    scripted = torch.jit.script(nn.Linear(2, 2).eval())

    with pytest.raises(SourceError, match=r"give the original nn\.Module"):
        torch_export.demand_exportable(scripted, "the user tower")


def test_weights_that_no_bundle_takes_are_refused_before_anything_runs():
    table = nn.Embedding(1 << 25, 513, device="meta").eval()  # no byte of it is there

    with pytest.raises(BundleError, match=r"has 68,853,694,464 bytes .* more than 68,719,476,736: use fewer"):
        torch_export.demand_exportable(table, "the item tower")


@pytest.mark.parametrize("pad", [0, ITEMS - 1, -1])
def test_a_padding_that_is_an_item_is_refused(pad):
    export_example = Example({"history": HISTORY}, {"item": INDEX}, pad=pad)

    with pytest.raises(SourceError, match="set first_item=1 in Example"):
        bound(towers.Mean(), export_example)


def test_flags_are_no_input():
    with pytest.raises(SourceError, match=r"inputs must be int32, int64 or float32"):
        export_tower(bound(towers.Featured(), example(country=torch.tensor([True, False]))))


def test_a_history_longer_than_its_table_of_places_is_named():
    export_example = Example({"history": HISTORY}, {"item": INDEX}, pad=ITEMS, max_length=100)

    with pytest.raises(SourceError, match="pad, max_length and the number of items must be those"):
        export_tower(bound(towers.Transformer(), export_example))


def test_towers_of_two_widths_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(
        SourceError, match="gives 8 numbers, the item tower 4: give both towers of the same fitted model"
    ):
        from_torch(
            towers.Mean().eval(), towers.Items(4).eval(), example(), to=tmp_path / "out",
            item_ids=range(ITEMS),
        )  # fmt: skip

    assert not (tmp_path / "out").exists()


def test_a_pickled_module_is_loaded_only_with_trust(tmp_path):
    path = tmp_path / "tower.pt"
    torch.save(towers.Items().eval(), path)

    def import_tower(**more):
        return from_torch(
            path, path, Example({"user": INDEX}, {"item": INDEX}), to=tmp_path / "out", item_ids=range(ITEMS),
            user_ids=range(ITEMS), **more,
        )  # fmt: skip

    with pytest.raises(SourceError, match=r"give the module, or set trust=True"):
        import_tower()
    assert not (tmp_path / "out").exists()
    assert import_tower(trust=True).items == ITEMS


@pytest.mark.parametrize(
    ("write", "remedy"),
    [
        (lambda path: torch.save(towers.Mean().state_dict(), path), "call load_state_dict, and give the module"),
        (lambda path: path.write_bytes(b"no module"), r"write it with torch.save(module, path)"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(write, remedy, tmp_path):
    write(tmp_path / "tower.pt")

    with pytest.raises(LarderError, match=re.escape(remedy)) as raised:
        from_torch(
            tmp_path / "tower.pt", towers.Items().eval(), example(), to=tmp_path / "out", item_ids=range(ITEMS),
            trust=True,
        )  # fmt: skip
    assert "\n" not in raised.value.message
