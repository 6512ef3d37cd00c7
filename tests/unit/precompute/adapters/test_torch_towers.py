"""Torch towers become a folder: the same vectors, whatever the kind of tower."""
# ruff: noqa: E402 - torch may not be there

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


from cache.errors import LarderError, SourceError
from cache.model.tower import Histories, Tower
from precompute.adapters.torch_export import Example, export_tower
from precompute.adapters.torch_towers import from_torch
from precompute.bundles import onnx_model
from precompute.bundles.bundle import Bundle
from tests.unit.precompute.adapters import torch_examples as towers
from tests.unit.precompute.adapters.torch_examples import DIMS, INDEX, ITEMS, bound, example

IDS = [f"i{row:02}" for row in range(ITEMS)]
FEATURES = {"country": torch.tensor([0, 1, 4]), "sizes": torch.rand(3, 3)}


def bundled(folder, name, **inputs):
    model = getattr(Bundle.open(folder / "bundle"), name)
    return Tower.open(model.path, model.spec).run(inputs)


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(("kind", "features"), [("Mean", {}), ("Gru", {}), ("Transformer", {}), ("Featured", FEATURES)])
def test_a_model_gives_what_torch_gives(kind, features, rows, exported, tmp_path):
    tower, model, spec = exported(kind, features)
    model.write(tmp_path / "tower.onnx")
    rng = np.random.default_rng(rows)
    histories = [rng.integers(0, ITEMS, rng.integers(1, 41)) for _ in range(rows)]
    more = {name: tensor.numpy()[np.arange(rows) % 3] for name, tensor in features.items()}

    vectors = Tower.open(tmp_path / "tower.onnx", spec).run({"history": Histories.of(histories), **more})

    with torch.no_grad():
        for row, history in enumerate(histories):
            row_features = [torch.from_numpy(feature_values[row : row + 1]) for feature_values in more.values()]
            expected_vector = tower(torch.from_numpy(history)[None], *row_features)[0].numpy()
            np.testing.assert_allclose(vectors[row], expected_vector, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def exported():
    """Each kind is exported once."""
    export_by_kind = {}

    def of(kind, features):
        if kind not in export_by_kind:
            torch.manual_seed(0)
            tower = bound(getattr(towers, kind)(), example(**features))
            export_by_kind[kind] = tower, *export_tower(tower)[:2]
        return export_by_kind[kind]

    return of


def test_a_folder_holds_the_user_tower_and_what_features_it_wants(tmp_path):
    user_tower, item_tower = towers.Featured().eval(), towers.Items().eval()
    users = ["u1", "u2"]
    user_features = {"country": torch.tensor([1, 2]), "sizes": torch.rand(2, 3)}

    report = from_torch(
        user_tower, item_tower, example(**FEATURES), to=tmp_path, item_ids=IDS, user_ids=users,
        user_features=user_features,
    )  # fmt: skip

    assert report.fold_in == "the user tower itself" and report.items == ITEMS
    assert 'user_features = "user_features.parquet"' in (tmp_path / "larder.toml").read_text()
    table = pq.read_table(tmp_path / "user_features.parquet")
    assert table.column_names == ["user", "country", "sizes"]
    item_vectors = bundled(tmp_path, "item_tower", item=np.arange(ITEMS))
    np.testing.assert_array_equal(item_vectors, item_tower.table.weight.detach().numpy())


def test_a_tower_whose_items_start_at_1_keeps_its_padding_0(tmp_path):
    class FromOne(towers.Items):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(ITEMS + 1, DIMS, padding_idx=0)

        def forward(self, item):
            return self.table(item) if item.ndim == 1 else self.table(item).sum(1)

    tower = FromOne().eval()
    export_example = Example({"history": towers.HISTORY}, {"item": INDEX}, pad=0, max_length=20, first_item=1)

    from_torch(tower, tower, export_example, to=tmp_path, item_ids=IDS)

    rows = tower.table.weight.detach().numpy()
    np.testing.assert_array_equal(bundled(tmp_path, "item_tower", item=np.arange(ITEMS)), rows[1:])
    user_vectors = bundled(tmp_path, "user_tower", history=Histories.of([[0, ITEMS - 1]]))
    np.testing.assert_allclose(user_vectors[0], rows[1] + rows[-1], rtol=1e-6)


def test_a_tower_of_user_indices_gives_vectors_and_strangers_are_folded(tmp_path):
    tower = towers.Items().eval()
    export_example = Example({"user": INDEX}, {"item": INDEX})

    report = from_torch(
        tower, towers.Items().eval(), export_example, to=tmp_path, item_ids=IDS, user_ids=["a", "b", "c"]
    )

    table = pq.read_table(tmp_path / "user_vectors.parquet")
    assert table["user"].to_pylist() == ["a", "b", "c"] and report.fold_in == "mean"
    np.testing.assert_array_equal(
        np.array(table["vector"].to_pylist(), np.float32), tower.table.weight[:3].detach().numpy()
    )


def test_a_fixed_length_is_said_to_hang_on_the_training_and_a_night_to_want_clicks(tmp_path):
    export_example = Example({"history": towers.HISTORY}, {"item": INDEX}, pad=ITEMS, max_length=20, is_fixed=True)

    report = from_torch(towers.Mean().eval(), towers.Items().eval(), export_example, to=tmp_path, item_ids=IDS)

    assert any(f"padded with {ITEMS} to 20 items" in limitation for limitation in report.cannot), report.cannot
    assert "name the files of interactions in [sources] interactions" in report.lines()[-1]
    assert '# user_column = "user"' in (tmp_path / "larder.toml").read_text()


def test_items_of_features_alone_bring_their_table(tmp_path):
    prices = torch.rand(ITEMS, DIMS)
    export_example = Example({"history": towers.HISTORY}, {"price": prices[:4]}, pad=ITEMS, max_length=20)

    report = from_torch(
        towers.Mean().eval(), torch.nn.Linear(DIMS, DIMS).eval(), export_example, to=tmp_path, item_ids=IDS,
        item_features={"price": prices},
    )  # fmt: skip

    assert pq.read_table(tmp_path / "item_features.parquet").column_names == ["item", "price"]
    assert not any("was not fitted on" in limitation for limitation in report.cannot)


@pytest.mark.parametrize("kind", ["path", "csv", "arrow", "polars", "arrays"])
def test_features_may_be_a_table_whose_further_columns_are_kept_for_filters(kind, tmp_path):
    price = np.arange(ITEMS, dtype=np.float32)
    category = [f"c{row % 3}" for row in range(ITEMS)]
    order = np.random.default_rng(0).permutation(ITEMS)
    table = pa.table({"category": category, "item": IDS, "price": price}).take(pa.array(order))
    if kind == "path":
        pq.write_table(table, tmp_path / "items.parquet")
    elif kind == "csv":
        pyarrow.csv.write_csv(table, tmp_path / "items.csv")
    features = {
        "path": tmp_path / "items.parquet",
        "csv": str(tmp_path / "items.csv"),
        "arrow": table,
        "polars": SimpleNamespace(to_arrow=lambda: table),
        "arrays": {"price": price, "category": category},
    }[kind]
    export_example = Example({"history": towers.HISTORY}, {"price": torch.ones(4)}, pad=ITEMS, max_length=20)

    report = from_torch(
        towers.Mean().eval(),
        towers.Priced().eval(),
        export_example,
        to=tmp_path / "out",
        item_ids=IDS,
        item_features=features,
    )

    written = pq.read_table(tmp_path / "out/item_features.parquet").to_pydict()
    assert written == {"item": IDS, "price": price.tolist(), "category": category}
    assert any("not take, are kept: category; for filters" in line for line in report.lines())


@pytest.mark.parametrize(
    ("table", "message_pattern"),
    [
        ({"item": IDS[1:], "price": [1.0] * (ITEMS - 1)}, "lacks rows for 1 item ids, 'i00' among them"),
        ({"item": [IDS[0], *IDS], "price": [1.0] * (ITEMS + 1)}, "item id 'i00' is repeated in row"),
        ({"price": [1.0]}, "has 1 rows for"),
    ],
)
def test_a_table_of_features_that_does_not_fit_the_ids_is_refused(table, message_pattern, tmp_path):
    export_example = Example({"history": towers.HISTORY}, {"price": torch.ones(4)}, pad=ITEMS, max_length=20)

    with pytest.raises(SourceError, match=message_pattern):
        from_torch(
            towers.Mean().eval(), towers.Priced().eval(), export_example, to=tmp_path, item_ids=IDS,
            item_features=pa.table(table),
        )  # fmt: skip
    with pytest.raises(SourceError, match="item_features is a list: give arrays by name, a table"):
        from_torch(
            towers.Mean().eval(), towers.Priced().eval(), export_example, to=tmp_path, item_ids=IDS, item_features=[1]
        )


def test_a_price_keeps_its_digits_for_filters(tmp_path):
    prices = [round(5.99 + 0.5 * item, 2) for item in range(ITEMS)]
    export_example = Example({"history": towers.HISTORY}, {"price": torch.ones(4)}, pad=ITEMS, max_length=20)

    report = from_torch(
        towers.Mean().eval(),
        towers.Priced().eval(),
        export_example,
        to=tmp_path / "out",
        item_ids=IDS,
        item_features=pa.table({"item": [*IDS, "new"], "price": [*prices, 1.0]}),
    )

    written = pq.read_table(tmp_path / "out/item_features.parquet")
    assert written["price"].to_pylist() == prices
    assert any("take in 1 row of item_features" in line for line in report.lines())


@pytest.mark.parametrize(
    ("prices", "message_pattern"),
    [
        (["dear"] * ITEMS, r"item_features: 'price' holds texts, but the item tower takes float32"),
        ([1.0] * 3 + [float("nan")] * (ITEMS - 3), "'price' is missing or NaN for 'i03', the first"),
        ([1.0] * 3 + [None] * (ITEMS - 3), "item_features: 'price' is missing or NaN for 'i03'"),
        ([1.0] * 3 + [float("inf")] * (ITEMS - 3), "item_features: 'price' is not finite for 'i03'"),
    ],
)
def test_a_feature_that_an_item_tower_cannot_take_is_named(prices, message_pattern, tmp_path):
    export_example = Example({"history": towers.HISTORY}, {"price": torch.ones(4)}, pad=ITEMS, max_length=20)

    with pytest.raises(SourceError, match=message_pattern):
        from_torch(
            towers.Mean().eval(), towers.Priced().eval(), export_example, to=tmp_path, item_ids=IDS,
            item_features=pa.table({"item": IDS, "price": prices}),
        )  # fmt: skip


@pytest.mark.parametrize("country", [1.5, None])
def test_a_code_of_a_user_that_is_no_whole_number_is_named(country, tmp_path):
    export_example = Example(
        {"history": towers.HISTORY, **{name: tensor[:2] for name, tensor in FEATURES.items()}},
        {"item": INDEX}, pad=ITEMS, max_length=20,
    )  # fmt: skip
    users = {"country": pa.array([0, 1, country], pa.float64()), "sizes": torch.rand(3, 3)}

    with pytest.raises(SourceError, match=r"user_features: 'country' is .* for 'u2'"):
        from_torch(
            towers.Featured().eval(), towers.Items().eval(), export_example, to=tmp_path, item_ids=IDS,
            user_ids=["u0", "u1", "u2"], user_features=users,
        )  # fmt: skip


def test_clicks_of_a_table_are_seen_in_order_of_time(tmp_path):
    (tmp_path / "clicks.csv").write_text("user,item,timestamp\nu1,i03,30\nu1,i09,10\nu2,i01,5\nu1,i05,20\nu1,i09,40\n")
    torch.manual_seed(0)
    tower = towers.Mean().eval()
    items = towers.Items().eval()
    with torch.no_grad():  # items that were clicked score above others
        items.table.weight.copy_(tower.table.weight[:ITEMS])
        for row in (3, 9, 5, 1):
            items.table.weight[row] *= 5

    report = from_torch(tower, items, example(), to=tmp_path / "out", item_ids=IDS, clicks=tmp_path / "clicks.csv")

    table = pq.read_table(tmp_path / "out" / "clicks.parquet").to_pydict()
    assert table["user"] == ["u1", "u1", "u1", "u2"]
    assert table["item"] == ["i05", "i03", "i09", "i01"]
    assert report.clicks == 4
    assert not any("know the order" in limitation for limitation in report.cannot)


@pytest.mark.parametrize(
    ("export_example", "remedy"),
    [
        (Example({"user": INDEX}, {"item": INDEX}), "give user_ids"),
        (Example({"history": towers.HISTORY, "age": INDEX}, {"item": INDEX}, pad=ITEMS), "user_features"),
        (Example({"history": towers.HISTORY}, {"history": INDEX}, pad=ITEMS), "give features other names"),
        (Example({}, {"item": INDEX}), "name each argument of forward"),
        (Example({"watched": towers.HISTORY}, {"item": INDEX}, pad=ITEMS), "name it history"),
        (Example({"history": towers.HISTORY}, {"item": INDEX}), "if it is another number, wrap the tower"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(export_example, remedy, tmp_path):
    with pytest.raises(SourceError, match=remedy) as raised:
        from_torch(
            towers.Mean().eval(), towers.Items().eval(), export_example, to=tmp_path / "out", item_ids=IDS,
            user_features={},
            user_ids=["u"] if "history" in export_example.user else None,
        )  # fmt: skip

    assert "\n" not in raised.value.message and not (tmp_path / "out").exists()


def test_weights_that_the_graph_cannot_hold_get_a_file_of_their_own(monkeypatch, tmp_path):
    spec_of, tower = {}, bound(towers.Mean(), example())
    for name, limit in (("inside", onnx_model.GRAPH_BYTES_MAX), ("outside", 0)):
        monkeypatch.setattr(onnx_model, "GRAPH_BYTES_MAX", limit)
        monkeypatch.setattr(onnx_model, "_INLINE_TENSOR_BYTES_MAX", 64)
        model, spec_of[name], error = export_tower(tower)
        weights_file = model.write(tmp_path / f"{name}.onnx")
        assert error < 1e-6 and (weights_file is None) == (name == "inside")
    histories = {"history": Histories.of([[1, 2, 3], [4]])}

    tower_outputs = [Tower.open(tmp_path / f"{name}.onnx", spec).run(histories) for name, spec in spec_of.items()]

    assert tower_outputs[0].tobytes() == tower_outputs[1].tobytes()


USERS = 300
WITH_COUNTRY = Example({"history": towers.HISTORY, "country": INDEX}, {"item": INDEX}, pad=ITEMS, max_length=20)
COUNTRY_ALONE = Example({"country": INDEX}, {"item": INDEX})


def imported_with_countries(folder, tower, export_example, item_ids, clicked=4, **changes):
    """Import of users who click items of one group, the country's; `item_ids` name the model's rows."""
    rng = np.random.default_rng(0)
    lines = [
        f"u{user},i{item:02}"
        for user in range(USERS)
        for item in rng.choice(np.arange(user % 5, ITEMS, 5), clicked, replace=False)
    ]
    (folder / "clicks.csv").write_text("\n".join(["user,item", *lines]))
    items = torch.nn.Embedding.from_pretrained(torch.eye(5)[torch.arange(ITEMS) % 5])
    arguments = {"user_features": {"country": np.arange(USERS) % (5 if tower is towers.Country else 3)}}
    items = changes.pop("item_tower", items)
    return from_torch(
        tower().eval(), items.eval(), export_example, to=folder / "out", item_ids=item_ids,
        user_ids=[f"u{user}" for user in range(USERS)], clicks=folder / "clicks.csv",
        **(arguments | changes),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tower", "export_example", "shuffled"),
    [
        (towers.TasteAndCountry, WITH_COUNTRY, np.random.default_rng(3).permutation(IDS).tolist()),
        (towers.Country, COUNTRY_ALONE, [*IDS[1:], IDS[0]]),
    ],
)
def test_shuffled_ids_are_refused_where_the_user_tower_takes_features(tower, export_example, shuffled, tmp_path):
    with pytest.raises(SourceError, match=r"score above a random item in \d+% of pairs, as by ch"):
        imported_with_countries(tmp_path, tower, export_example, shuffled)

    assert not (tmp_path / "out").exists()
    report = imported_with_countries(tmp_path, tower, export_example, IDS)
    assert report.recalls["the user tower"] > 0.5
    assert not any("item_ids are in the order" in limit for limit in report.cannot)


class CountryAndHistory(towers.Country):
    """The country's group, which alone ranks better than chance, and the mean of a history's rows, which are noisy."""

    def __init__(self):
        super().__init__()
        noise = torch.randn(ITEMS + 1, 5, generator=torch.Generator().manual_seed(1))
        rows = 0.5 * torch.eye(5)[torch.arange(ITEMS + 1) % 5] + 0.5 * noise
        self.items = torch.nn.Embedding.from_pretrained(rows)

    def forward(self, history, country):  # type: ignore[override]
        real = (history != ITEMS).float().unsqueeze(-1)
        mean = (self.items(history) * real).sum(1) / real.sum(1).clamp(min=1)
        return 0.3 * super().forward(country) + mean


def noisy_countries():
    """Countries of which a third are another group's: the history knows better."""
    groups, rng = np.arange(USERS) % 5, np.random.default_rng(7)
    return np.where(rng.random(USERS) < 0.35, rng.integers(0, 5, USERS), groups)


def test_features_of_other_users_are_said_to_rank_no_worse(tmp_path):
    of_group = Example({"history": towers.HISTORY, "country": INDEX}, {"group": INDEX}, pad=ITEMS)
    others = np.random.default_rng(5).permutation(noisy_countries())

    report = imported_with_groups(
        tmp_path, of_group, IDS, user_features={"country": others},
        item_features={"group": np.arange(ITEMS) % 5},
    )  # fmt: skip

    (limit,) = [limit for limit in report.cannot if "in the order of the model's rows" in limit]
    assert "tell whether user_ids are" in limit and "with those of other users" in limit


def imported_with_groups(folder, export_example, item_ids, **features):
    return imported_with_countries(
        folder, CountryAndHistory, export_example, item_ids, clicked=6,
        item_tower=torch.nn.Embedding.from_pretrained(torch.eye(5)), **features,
    )  # fmt: skip


@pytest.mark.parametrize("code", [-1, -5])
def test_a_negative_code_is_refused_as_one_beyond_the_table(code, tmp_path):
    tower = bound(towers.Country(), COUNTRY_ALONE)
    model, spec, _ = export_tower(tower)
    model.write(tmp_path / "tower.onnx")
    opened_tower = Tower.open(tmp_path / "tower.onnx", spec)
    for wrong in (code, 5):
        with pytest.raises(LarderError, match="out of data bounds"):
            opened_tower.run({"country": np.array([1, wrong])})
    assert opened_tower.run({"country": np.array([1, 4])}).shape == (2, 5)

    countries = np.arange(USERS) % 5
    countries[7] = code
    with pytest.raises(SourceError, match=rf"user 'u7': .* cannot be run on country {code}"):
        imported_with_countries(tmp_path, towers.Country, COUNTRY_ALONE, IDS, user_features={"country": countries})


def test_int8_is_compared_also_where_the_user_tower_takes_features(tmp_path):
    report = imported_with_countries(tmp_path, towers.TasteAndCountry, WITH_COUNTRY, IDS)

    assert report.agreement["overlap_at_20"] > 0.8
    assert any("the int8 form, which gives live answers, finds" in line for line in report.lines())


def test_clicks_that_cannot_judge_the_ids_are_said_to(tmp_path):
    few = imported_with_countries(tmp_path, towers.TasteAndCountry, WITH_COUNTRY, IDS, clicked=1)

    without_features = imported_with_countries(tmp_path, towers.TasteAndCountry, WITH_COUNTRY, IDS, user_features=None)

    (limit,) = [limit for limit in few.cannot if "order of the model's rows" in limit]
    assert "no user has clicked two items" in limit
    (limit,) = [limit for limit in without_features.cannot if "order of the model's rows" in limit]
    assert "user_features was not given" in limit


def test_a_user_on_whose_features_the_model_cannot_be_run_is_named(tmp_path):
    countries = np.arange(USERS) % 3
    countries[7] = 3

    with pytest.raises(SourceError, match=r"user 'u7': the model user_tower\.onnx cannot be run on country 3"):
        imported_with_countries(
            tmp_path, towers.TasteAndCountry, WITH_COUNTRY, IDS, user_features={"country": countries}
        )

    assert not (tmp_path / "out").exists()


def test_an_item_whose_code_the_model_does_not_know_is_named(tmp_path):
    export_example = Example({"history": towers.HISTORY}, {"group": INDEX}, pad=ITEMS)
    groups = np.full(ITEMS, 1)
    groups[9] = 5

    with pytest.raises(SourceError, match=r"item tower fails on item 'i09' with group 5: .*; give the codes"):
        from_torch(
            towers.Mean().eval(), torch.nn.Embedding(5, DIMS).eval(), export_example, to=tmp_path / "out",
            item_ids=IDS, item_features={"group": groups},
        )  # fmt: skip
