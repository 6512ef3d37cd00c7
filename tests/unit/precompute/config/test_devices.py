"""Where scoring runs: what is demanded, what is found, and that nobody pays for a torch that is not wanted."""

import importlib.util
import subprocess
import sys

import pytest

from cache.errors import ConfigError
from precompute.config import devices
from precompute.config.settings import NightConfig, night_config
from precompute.scoring.shard import Scorers


@pytest.fixture(autouse=True)
def forgotten():
    devices.devices.cache_clear()
    yield
    devices.devices.cache_clear()


def test_a_machine_without_a_gpu_never_imports_torch():
    code = (
        "import sys\n"
        "from cache.control.night_steps import NIGHT\n"
        "from precompute.operations.night import step_in_night\n"
        "assert [step_in_night(name) for name in NIGHT]\n"
        "from precompute.config import devices\n"
        "devices._SIGNS = ()\n"
        "assert devices.devices('auto') == devices.devices('off') == ()\n"
        "assert devices.device_of('auto', 3) is None\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_gpu_without_torch_is_said_and_left(monkeypatch, caplog, tmp_path):
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(devices, "_SIGNS", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert devices.devices("auto") == ()
    assert "extra `gpu`" in caplog.text
    with pytest.raises(ConfigError, match="install the extra `gpu`"):
        devices.devices("cuda")


def test_a_gpu_that_is_demanded_must_be_there():
    torch = pytest.importorskip("torch", reason="make torch-env")
    if torch.cuda.is_available():
        pytest.skip("there is one")

    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            devices.devices(wanted)
    assert devices.devices("cpu") == ("cpu",)


def test_several_gpus_take_the_shards_in_turn(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch", reason="make torch-env")
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(devices, "_SIGNS", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    scorers = Scorers("auto")

    assert devices.devices("auto") == ("cuda:0", "cuda:1")
    assert [devices.device_of("auto", shard) for shard in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert devices.device_of("cuda:1", 0) == "cuda:1"
    assert scorers.at(0) is scorers.at(2) is not scorers.at(1)
    assert scorers.at(1).device == "cuda:1"


def test_the_setting_is_checked_and_the_environment_has_its_say():
    assert NightConfig().device == "auto"
    assert night_config(environment={"LARDER_DEVICE": "cuda:3"}).device == "cuda:3"
    with pytest.raises(ConfigError, match="not 'gpu'"):
        NightConfig(device="gpu")


def test_the_device_decides_nothing_of_a_generation():
    assert NightConfig(device="off").semantic() == NightConfig(device="cuda").semantic()


def test_a_shard_takes_the_gpu_that_no_other_process_scores_on(monkeypatch, tmp_path):
    """Shards 0 and 2 ran on GPU 0 while GPU 1 idled."""
    monkeypatch.setattr(devices, "devices", lambda wanted: ("cuda:0", "cuda:1"))
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from precompute.config import devices\n"
        "devices.devices = lambda wanted: ('cuda:0', 'cuda:1')\n"
        "with devices.least_busy('auto', 0, Path(sys.argv[1])) as device:\n"
        "    print(device, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with other:
        assert other.stdout is not None and other.stdout.readline() == "cuda:0\n"
        with devices.least_busy("auto", 2, tmp_path) as second:
            assert second == "cuda:1"
            with devices.least_busy("auto", 4, tmp_path) as third:  # all are taken: two share
                assert third == "cuda:0"
        other.kill()
    with devices.least_busy("auto", 2, tmp_path) as after:
        assert after == "cuda:0"


def test_one_device_or_none_is_taken_without_a_lock(monkeypatch, tmp_path):
    for found, taken in (((), None), (("cuda:1",), "cuda:1")):
        monkeypatch.setattr(devices, "devices", lambda wanted, found=found: found)
        with devices.least_busy("auto", 3, tmp_path) as device:
            assert device == taken
    assert not list(tmp_path.iterdir())
