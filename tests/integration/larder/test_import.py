"""A fitted model of implicit, from its file to served answers: what the library itself recommends."""

import json
import uuid
from pathlib import Path

import httpx
import implicit
import numpy as np
import pytest
import scipy.sparse as sp
from threadpoolctl import threadpool_limits

from cache.process.redis_server import RedisServer
from precompute.adapters import folder
from precompute.adapters.vectors import from_vectors
from tests.integration.larder.commands import larder, running

USERS, ITEMS, TOP = 120, 90, 20


@pytest.fixture(scope="module")
def user_items() -> sp.csr_matrix:
    """Clicks of users who like every third item best."""
    taste = np.add.outer(np.arange(USERS), np.arange(ITEMS)) % 3 == 0
    clicks = np.random.default_rng(5).random((USERS, ITEMS)) < np.where(taste, 0.4, 0.03)
    return sp.csr_matrix(clicks.astype(np.float32))


def test_what_is_served_is_what_the_library_recommends(
    user_items: sp.csr_matrix, redis_server: RedisServer, tmp_path: Path
) -> None:
    redis = {"REDIS_URL": redis_server.url, "LARDER_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}"}
    with threadpool_limits(1, "blas"):  # implicit warns of more
        model = implicit.als.AlternatingLeastSquares(factors=16, alpha=8.0, random_state=1, num_threads=1)
        model.fit(user_items, show_progress=False)
    model.save(str(tmp_path / "als.npz"))
    sp.save_npz(tmp_path / "user_items.npz", user_items)
    (tmp_path / "items.txt").write_text("".join(f"item-{n}\n" for n in range(ITEMS)))
    shop = tmp_path / "shop"

    import_report = json.loads(
        larder(
            tmp_path, "import", "implicit", "als.npz", "--clicks", "user_items.npz",
            "--item-ids", "items.txt", "--to", "shop", "--json",
        )
    )  # fmt: skip
    settings = shop / "larder.toml"
    settings.write_text(settings.read_text().replace("k = 100", 'k = 50\nprecision = "f4"'))
    larder(shop, "check", environ=redis)
    larder(shop, "night", "--quiet", environ=redis)

    assert import_report["fold_in"] == "the model's own equations"
    assert import_report["users"] == USERS and import_report["recalls"][import_report["fold_in"]] > 0.3
    items, scores = model.recommend(np.arange(USERS), user_items, N=TOP)
    with running(shop, "serve", "--port", "0", line_prefix="Larder serves on ", environ=redis) as url:
        body = {"k": TOP, "entities": [{"id": str(user)} for user in range(USERS)]}
        answers = httpx.post(f"{url}/v1/lookup/user_topk", json=body, timeout=30).json()["answers"]
        history = [f"item-{item}" for item in user_items[0].indices]
        new = {"k": TOP, "entities": [{"id": "new", "history": history}]}
        (live,) = httpx.post(f"{url}/v1/lookup/user_topk", json=new, timeout=30).json()["answers"]

    for user, answer in enumerate(answers):
        assert answer["source"] in ("l1", "l2")
        assert answer["items"] == [f"item-{item}" for item in items[user]]
        assert np.allclose(answer["scores"], scores[user], rtol=1e-5, atol=1e-6)
    # An unknown user with the same history gets the library's own fold-in, by the int8 model.
    expected = model.recommend(0, user_items[0], N=TOP, recalculate_user=True)
    assert live["source"] == "live"
    assert len({f"item-{item}" for item in expected[0]} & set(live["items"])) >= TOP - 3
    assert np.allclose(live["scores"][:5], expected[1][:5], rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vectors", "--items", "none.npy"), "there is no file none.npy"),
        (("implicit", "pickled.pkl", "--clicks", "clicks.npz"), "pickled.pkl is pickled, and "),
        (("implicit", "empty.npz", "--clicks", "clicks.npz"), "give the .npz file that `model.save` w"),
        (("implicit", "model.npz", "--clicks", "turned.npz"), "give its transpose"),
        (("implicit", "model.npz", "--clicks", "named.csv"), "name it by --user-column"),
        (("implicit", "model.npz", "--clicks", "shop.csv"), "give user_ids (--user-ids) and item_ids (--item-ids)"),
    ],
)
def test_models_that_cannot_be_imported_are_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.npz").touch()
    np.savez(tmp_path / "model.npz", user_factors=np.ones((3, 2)), item_factors=np.ones((4, 2)))
    (tmp_path / "pickled.pkl").write_bytes(b"\x80\x04.")
    sp.save_npz(tmp_path / "clicks.npz", sp.csr_matrix(np.ones((3, 4))))
    sp.save_npz(tmp_path / "turned.npz", sp.csr_matrix(np.ones((4, 3))))

    (tmp_path / "named.csv").write_text("customer,item\na,b\n")
    (tmp_path / "shop.csv").write_text("user,item\nanna,hat\n")

    output = larder(tmp_path, "import", *arguments, "--to", "shop", code=2)

    assert output.startswith("larder: ") and output.count("\n") == 1 and message in output
    assert not (tmp_path / "shop").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "items.npy", np.eye(4, dtype=np.float32))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "notes.txt").write_text("mine")
    arguments = ("import", "vectors", "--items", "items.npy", "--to", "shop")

    assert "was not made by an import" in larder(tmp_path, *arguments, code=2)

    assert [path.name for path in (tmp_path / "shop").iterdir()] == ["notes.txt"]
    (tmp_path / "shop" / "notes.txt").unlink()
    larder(tmp_path, *arguments)
    (tmp_path / "shop" / "larder.toml").write_text("# changed\n")
    larder(tmp_path, *arguments)
    assert (tmp_path / "shop" / "larder.toml").read_text() == "# changed\n"
    output = larder(tmp_path, *arguments, "--users", "items.npy")
    assert "use user_vectors.parquet: larder.toml, which was kept, does not name it" in output


def test_an_import_that_died_on_its_way_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_write_tables", die)
        with pytest.raises(KeyboardInterrupt):
            from_vectors(None, np.eye(4, dtype=np.float32), to=tmp_path / "shop")

    report = from_vectors(None, np.eye(4, dtype=np.float32), to=tmp_path / "shop")
    assert json.loads((tmp_path / "shop" / "import.json").read_text())["items"] == report.items == 4


def test_the_report_counts_what_it_left_out_and_says_what_it_replaced(tmp_path: Path) -> None:
    np.save(tmp_path / "items.npy", np.eye(4, dtype=np.float32))
    (tmp_path / "clicks.csv").write_text(
        "user,item,at\na,0,1\na,0,2\nb,1,3\nb,elsewhere,4\n" + "".join(f"u{n},{n % 4},{n}\n" for n in range(30))
    )
    arguments = (
        "import", "vectors", "--items", "items.npy", "--clicks", "clicks.csv", "--to", "shop",
        "--timestamp-column", "at",
    )  # fmt: skip

    first, second_output = (larder(tmp_path, *arguments) for _ in range(2))

    for output in (first, second_output):
        assert "clicks left out: 1 repeats, 1 of unknown users or items\n" in output
        assert "clicks are ordered by their times\n" in output
    assert "is replaced, its larder.toml kept" in second_output and "is replaced" not in first
