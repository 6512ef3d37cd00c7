"""The GPU bench: says that there is nothing to measure, and measures what it is told to."""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest

from tests.bench import gpu
from tests.bench.device import __main__ as session
from tests.bench.tools.harness import Report


def bench(device, name="gpu"):
    environment = {**os.environ, "LARDER_DEVICE": device}
    environment.pop("LARDER_BENCH_DATA", None)
    command = [sys.executable, "-m", f"tests.bench.{name}", "--quick", "--json"]
    completed_process = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(completed_process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["gpu", "device.equal", "device.shard"])
def test_without_a_device_it_says_so_and_gives_no_ratio(name):
    if name != "gpu":
        pytest.importorskip("torch", reason="make torch-env")
    report = bench("off", name)

    assert report["figures"]["device"] == "none: nothing is measured"
    assert report["ratios"] == {}


@pytest.mark.slow
def test_it_runs_to_its_end_on_torchs_processor_device():
    pytest.importorskip("torch", reason="make torch-env")

    report = bench("cpu")

    assert report["figures"]["million_recall"] == report["figures"]["skewed_recall"] == 1.0
    assert {"gpu.million_vs_matrix_product", "gpu.skewed_vs_matmul_topk"} <= set(report["rows"])


@pytest.mark.slow
def test_shards_run_to_their_end_on_torchs_processor_device():
    pytest.importorskip("torch", reason="make torch-env")

    report = bench("cpu", "device.shard")

    assert report["figures"]["limiting_stage"] == "topk"
    assert set(report["rows"]) == {"shard.from_partition_to_pages_vs_kernel"}


@pytest.mark.slow
def test_all_lists_of_torchs_processor_device_are_the_processors():
    pytest.importorskip("torch", reason="make torch-env")

    figures = bench("cpu", "device.equal")["figures"]

    assert figures["equal_users"] == figures["users"] > 0


def test_a_session_without_a_gpu_runs_nothing_and_has_a_code_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(session, "devices", lambda device_setting: ())
    monkeypatch.setattr(session, "ran", lambda *_, **__: pytest.fail("something was run"))

    assert session.main() == 3
    assert "nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize(("broken", "code"), [(None, 0), ("tests.bench.gpu", 1), ("pytest", 1)])
def test_a_session_keeps_what_went_well_under_the_name_of_the_gpu(monkeypatch, tmp_path, broken, code):
    monkeypatch.setattr(session, "devices", lambda device_setting: ("cuda:0",))
    monkeypatch.setattr(session, "name_of", lambda device: "h200")
    monkeypatch.setattr(session, "ROOT", tmp_path)
    monkeypatch.setattr(session, "RESULTS", tmp_path)
    monkeypatch.setattr(
        session, "ran", lambda command, *_, **__: (int(command[0] == broken), 'a table\n{"bench": "x"}\n')
    )

    assert session.main() == code

    # Output that a bench printed before it failed is kept, too: time on a GPU is rare.
    names = {f"{bench}-h200.json" for bench in ("gpu", "equal", "shard", "profile")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(json.loads(path.read_text())["date"] for path in tmp_path.iterdir())


def test_a_part_of_a_session_that_takes_too_long_is_ended(capsys):
    slow = ["timeit", "-n", "1", "print('{}', flush=True); import time; time.sleep(60)"]
    assert session.ran(slow, 5.0) == (124, "{}\n")
    assert session.ran(["this"], 30.0)[0] == 0
    assert sum(seconds for _, seconds in session.BENCHES.values()) + session.TESTS_S <= 480


def install_flashlib(monkeypatch, flash_knn):
    """Make a FlashLib importable whose search is this function."""
    for name in ("flashlib", "flashlib.primitives", "flashlib.primitives.knn"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["flashlib.primitives.knn"])["flash_knn"] = flash_knn


def nearest(users, items, k, *, backend):
    """FlashLib's search by torch: (squared distances, ordinals)."""
    import torch

    assert backend == "torch"
    closest_items = torch.topk(torch.cdist(users, items), k, largest=False)
    return closest_items.values**2, closest_items.indices.to(torch.int32)


def test_flashlib_is_measured_by_a_named_path_and_its_recall_is_of_its_own_distance(monkeypatch):
    torch = pytest.importorskip("torch", reason="make torch-env")
    install_flashlib(monkeypatch, nearest)
    report, case = Report("gpu"), gpu.draw_case(32, 1000, 16, skewed=True)

    users_and_search = gpu.flashlib(report, "skewed", case, torch.device("cpu"))

    assert users_and_search is not None and users_and_search[0] == 32
    assert np.asarray(users_and_search[1]()).shape == (32, gpu.K)
    assert report.figures == {
        "skewed_flashlib": "torch, float32, squared L2",
        "skewed_flashlib_recall": 1.0,
        "skewed_flashlib_users": 32,
    }


def test_a_flashlib_that_fails_is_a_figure_and_the_others_are_measured(monkeypatch):
    torch = pytest.importorskip("torch", reason="make torch-env")

    def fails(*_, **__):
        raise RuntimeError("out of resources")

    install_flashlib(monkeypatch, fails)
    report = Report("gpu")

    assert gpu.flashlib(report, "million", gpu.draw_case(8, 1000, 8), torch.device("cpu")) is None
    assert report.figures == {"million_flashlib": "failed: RuntimeError: out of resources"}


def test_baselines_that_make_lists_get_the_first_users_with_their_histories():
    case = gpu.draw_case(40, 1000, 4)

    first_users_case = gpu.first_users(case, 10)

    assert np.array_equal(first_users_case.users, case.users[:10]) and first_users_case.items is case.items
    assert np.array_equal(first_users_case.histories.indptr, case.histories.indptr[:11])
    assert gpu.first_users(case, 40) is case
