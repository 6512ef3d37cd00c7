"""The GPU bench: says that there is nothing to measure, and measures what it is told to."""

import json
import os
import subprocess
import sys

import pytest

from tests.bench.device import __main__ as session


def bench(device, name="gpu"):
    environment = {**os.environ, "LARDER_DEVICE": device}
    environment.pop("LARDER_BENCH_DATA", None)
    command = [sys.executable, "-m", f"tests.bench.{name}", "--quick", "--json"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["gpu", "device.equal", "device.shard"])
def test_without_a_device_it_says_so_and_gives_no_ratio(name):
    if name != "gpu":
        pytest.importorskip("torch", reason="make torch-env")
    found = bench("off", name)

    assert found["figures"]["device"] == "none: nothing is measured"
    assert found["ratios"] == {}


@pytest.mark.slow
def test_it_runs_to_its_end_on_torchs_processor_device():
    pytest.importorskip("torch", reason="make torch-env")

    found = bench("cpu")

    assert found["figures"]["million_recall"] == found["figures"]["skewed_recall"] == 1.0
    assert {"gpu.million_vs_matrix_product", "gpu.skewed_vs_matmul_topk"} <= set(found["rows"])


@pytest.mark.slow
def test_shards_run_to_their_end_on_torchs_processor_device():
    pytest.importorskip("torch", reason="make torch-env")

    found = bench("cpu", "device.shard")

    assert found["figures"]["limiting_stage"] == "topk"
    assert set(found["rows"]) == {"shard.from_partition_to_pages_vs_kernel"}


@pytest.mark.slow
def test_all_lists_of_torchs_processor_device_are_the_processors():
    pytest.importorskip("torch", reason="make torch-env")

    found = bench("cpu", "device.equal")["figures"]

    assert found["equal_users"] == found["users"] > 0


def test_a_session_without_a_gpu_runs_nothing_and_has_a_code_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(session, "devices", lambda wanted: ())
    monkeypatch.setattr(session, "ran", lambda *_, **__: pytest.fail("something was run"))

    assert session.main() == 3
    assert "nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize(("broken", "code"), [(None, 0), ("tests.bench.gpu", 1), ("pytest", 1)])
def test_a_session_keeps_what_went_well_under_the_name_of_the_gpu(
    monkeypatch, tmp_path, broken, code
):
    monkeypatch.setattr(session, "devices", lambda wanted: ("cuda:0",))
    monkeypatch.setattr(session, "name_of", lambda device: "h200")
    monkeypatch.setattr(session, "ROOT", tmp_path)
    monkeypatch.setattr(session, "RESULTS", tmp_path)
    monkeypatch.setattr(
        session,
        "ran",
        lambda words, *_, **__: (int(words[0] == broken), 'a table\n{"bench": "x"}\n'),
    )

    assert session.main() == code

    names = {"gpu-h200.json", "equal-h200.json", "shard-h200.json"} - (
        {"gpu-h200.json"} if code and broken != "pytest" else set()
    )
    assert {each.name for each in tmp_path.iterdir()} == names
    assert all(json.loads(each.read_text())["date"] for each in tmp_path.iterdir())


def test_a_part_of_a_session_that_takes_too_long_is_ended(capsys):
    assert session.ran(["timeit", "-n", "1", "import time; time.sleep(60)"], 0.5)[0] == 124
    assert session.ran(["this"], 30.0)[0] == 0
    assert sum(seconds for _, seconds in session.BENCHES.values()) + session.TESTS_S < 600
