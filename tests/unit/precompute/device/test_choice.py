"""Where scoring runs: what is demanded, what is found, and that nobody pays for a torch that is not wanted."""

import importlib.util
import subprocess
import sys

import pytest

from cache.errors import ConfigError
from precompute.config import NightConfig, night_config
from precompute.scoring.device import choice
from precompute.scoring.shard import Scorers


@pytest.fixture(autouse=True)
def forgotten():
    choice.devices.cache_clear()
    yield
    choice.devices.cache_clear()


def test_a_machine_without_a_gpu_never_imports_torch():
    code = (
        "import sys\n"
        "from precompute import pipeline\n"
        "from precompute.scoring.device import choice\n"
        "choice._SIGNS = ()\n"
        "assert choice.devices('auto') == choice.devices('off') == ()\n"
        "assert choice.device_of('auto', 3) is None\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_gpu_without_torch_is_said_and_left(monkeypatch, caplog, tmp_path):
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(choice, "_SIGNS", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert choice.devices("auto") == ()
    assert "extra `gpu`" in caplog.text
    with pytest.raises(ConfigError, match="install the extra `gpu`"):
        choice.devices("cuda")


def test_a_gpu_that_is_demanded_must_be_there():
    torch = pytest.importorskip("torch", reason="make torch-env")
    if torch.cuda.is_available():
        pytest.skip("there is one")

    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            choice.devices(wanted)
    assert choice.devices("cpu") == ("cpu",)


def test_several_gpus_take_the_shards_in_turn(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch", reason="make torch-env")
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(choice, "_SIGNS", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    scorers = Scorers("auto")

    assert choice.devices("auto") == ("cuda:0", "cuda:1")
    assert [choice.device_of("auto", shard) for shard in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert choice.device_of("cuda:1", 0) == "cuda:1"
    assert scorers.at(0) is scorers.at(2) is not scorers.at(1)
    assert scorers.at(1).device == "cuda:1"


def test_the_setting_is_checked_and_the_environment_has_its_say():
    assert NightConfig().device == "auto"
    assert night_config(environment={"LARDER_DEVICE": "cuda:3"}).device == "cuda:3"
    with pytest.raises(ConfigError, match="not 'gpu'"):
        NightConfig(device="gpu")


def test_the_device_decides_nothing_of_a_generation():
    assert NightConfig(device="off").semantic() == NightConfig(device="cuda").semantic()
