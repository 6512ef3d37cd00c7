"""Where scoring runs: what is demanded, what is found, and that nobody pays for a torch that is not wanted."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from cache.errors import ConfigError
from precompute.config import devices
from precompute.config.settings import NightConfig, night_config
from precompute.scoring import scorers as shard
from precompute.scoring.scorers import Scorers


@pytest.fixture(autouse=True)
def forgotten():
    devices.devices.cache_clear()
    yield
    devices.devices.cache_clear()


def test_a_machine_without_a_gpu_never_imports_torch():
    code = (
        "import sys\n"
        "from cache.config.timetable import NIGHT_STEPS\n"
        "from precompute.steps.night import find_step\n"
        "assert [find_step(name) for name in NIGHT_STEPS]\n"
        "from precompute.config import devices\n"
        "devices._GPU_DEVICE_FILES = ()\n"
        "assert devices.devices('auto') == devices.devices('off') == ()\n"
        "assert devices.device_for_shard('auto', 3) is None\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_gpu_without_torch_is_said_and_left(monkeypatch, caplog, tmp_path):
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(devices, "_GPU_DEVICE_FILES", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert devices.devices("auto") == ()
    assert "extra `gpu`" in caplog.text
    with pytest.raises(ConfigError, match="install the extra `gpu`"):
        devices.devices("cuda")


def test_a_gpu_that_is_demanded_must_be_there():
    torch = pytest.importorskip("torch", reason="make torch-env")
    if torch.cuda.is_available():
        pytest.skip("there is one")

    for device_setting in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="torch finds no GPU"):
            devices.devices(device_setting)
    assert devices.devices("cpu") == ("cpu",)


def test_several_gpus_take_the_shards_in_turn(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch", reason="make torch-env")
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(devices, "_GPU_DEVICE_FILES", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(shard, "limit_gpu_memory", lambda *_: 0)
    scorers = Scorers("auto")

    assert devices.devices("auto") == ("cuda:0", "cuda:1")
    assert [devices.device_for_shard("auto", shard_number) for shard_number in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    assert devices.device_for_shard("cuda:1", 0) == "cuda:1"
    assert scorers.device_of_shard(0) is not scorers.device_of_shard(1)
    assert scorers.device_of_shard(0) is scorers.device_of_shard(2) is scorers.device_of_shard(0)
    assert scorers.device_of_shard(1).device == "cuda:1"


def test_the_setting_is_checked_and_the_environment_has_its_say():
    assert NightConfig().device == "auto"
    assert night_config(environment={"LARDER_DEVICE": "cuda:3"}).device == "cuda:3"
    with pytest.raises(ConfigError, match="not 'gpu'"):
        NightConfig(device="gpu")


def test_the_device_decides_nothing_of_a_generation():
    assert NightConfig(device="off").semantic_settings_bytes() == NightConfig(device="cuda").semantic_settings_bytes()


def test_a_gpu_that_is_done_takes_the_next_shard(monkeypatch):
    monkeypatch.setattr(shard, "devices", lambda device_setting: ("cuda:0", "cuda:1"))
    monkeypatch.setattr(shard, "limit_gpu_memory", lambda *_: 0)
    scorers = Scorers("auto")

    assert [scorers.device_of_shard(shard_number).device for shard_number in range(4)] == ["cuda:0", "cuda:1"] * 2
    scorers.mark_finished(1)
    scorers.mark_finished(3)

    assert [scorers.device_of_shard(shard_number).device for shard_number in (4, 5)] == ["cuda:1", "cuda:1"]
    assert scorers.device_of_shard(0).device == "cuda:0"


def share_memory(device, tasks):
    """Bytes of an 8 GB GPU that one of so many tasks is given, and the part of it that torch is kept to."""
    torch = pytest.importorskip("torch", reason="make torch-env")
    fraction_calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *each: fraction_calls.append(each))
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 << 30))
        return devices.limit_gpu_memory(device, tasks), fraction_calls


def test_tasks_that_share_a_gpu_share_its_memory_by_declaration():
    assert share_memory("cuda:1", 2) == (4 << 30, [(0.5, "cuda:1")])
    assert share_memory("cpu", 2) == (0, [])


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("", ["UUID 0", "UUID 1"]),
        ("3,2", ["UUID 0", "UUID 1"]),
        ("MIG-GPU-5/1/0", ["MIG-GPU-5-1-0", "UUID 1"]),
        ("GPU-8,MIG-9", ["GPU-8", "MIG-9"]),
    ],
)
def test_a_gpu_has_one_name_whatever_a_process_sees(monkeypatch, visible, names):
    torch = pytest.importorskip("torch", reason="make torch-env")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"UUID {device[-1]}"))

    assert [devices.gpu_identity(f"cuda:{number}") for number in range(2)] == names


SCORING_PROGRAM = """
import sys
from pathlib import Path
from precompute.config import devices
devices.devices = lambda wanted: ("cuda:0", "cuda:1", "cuda:2")
devices.gpu_identity = lambda device: device[-1]
with devices.claim_least_busy_device("auto", int(sys.argv[2]), 2, Path(sys.argv[1])) as device:
    print(device, flush=True)
    sys.stdin.read()
"""


@contextmanager
def scoring_process(folder, shard_number):
    """(the process that scores a shard, its device)."""
    command = [sys.executable, "-c", SCORING_PROGRAM, str(folder), str(shard_number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_shard_takes_the_gpu_on_which_fewest_processes_score(monkeypatch, tmp_path, caplog):
    """Shards 0 and 2 ran on GPU 0 while GPU 1 idled."""
    monkeypatch.setattr(devices, "devices", lambda device_setting: ("cuda:0", "cuda:1", "cuda:2"))
    monkeypatch.setattr(devices, "gpu_identity", lambda device: device[-1])

    def choose_device(number):
        with devices.claim_least_busy_device("auto", number, 2, tmp_path) as device:
            return device

    with ExitStack() as stack:
        scoring_processes = [stack.enter_context(scoring_process(tmp_path, 0)) for _ in range(5)]
        assert [device[-1] for _, device in scoring_processes] == ["0", "1", "2", "0", "1"]
        assert choose_device(0) == "cuda:2"  # one scores there, two on the others

        # When one of the processes on GPU 1 and both on GPU 0 are killed
        for killed in (scoring_processes[4], scoring_processes[0], scoring_processes[3]):
            killed[0].kill()
            killed[0].wait()
        assert choose_device(1) == "cuda:0"  # its claims are gone with it
        with devices.claim_least_busy_device("auto", 0, 2, tmp_path) as first:
            assert first == "cuda:0"
            assert [choose_device(number) for number in (0, 1, 2)] == ["cuda:0", "cuda:1", "cuda:2"]
        assert "device_tasks" not in caplog.text

        # When more processes start than were declared
        more = [stack.enter_context(scoring_process(tmp_path, 0)) for _ in range(4)]
        assert sorted(device for _, device in more) == ["cuda:0", "cuda:0", "cuda:1", "cuda:2"]
        assert choose_device(1) == "cuda:1" and "3 processes score on cuda:1" in caplog.text


def test_no_gpu_is_taken_without_a_lock(monkeypatch, tmp_path):
    for visible_devices, expected_device in (((), None), (("cpu",), "cpu")):
        monkeypatch.setattr(devices, "devices", lambda device_setting, visible_devices=visible_devices: visible_devices)
        with devices.claim_least_busy_device("auto", 3, 1, tmp_path) as device:
            assert device == expected_device
    assert not list(tmp_path.iterdir())


def test_more_tasks_than_declared_on_the_one_gpu_are_reported(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(devices, "devices", lambda device_setting: ("cuda:1",))
    monkeypatch.setattr(devices, "gpu_identity", lambda device: device[-1])

    with ExitStack() as stack:
        claimed_devices = [
            stack.enter_context(devices.claim_least_busy_device("auto", number, 2, tmp_path)) for number in range(2)
        ]
        assert not caplog.text
        claimed_devices.append(stack.enter_context(devices.claim_least_busy_device("auto", 2, 2, tmp_path)))

    assert claimed_devices == ["cuda:1"] * 3
    assert "3 processes score on cuda:1, more than device_tasks (2)" in caplog.text


def test_a_process_that_keeps_the_choice_is_named_and_not_waited_for(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(devices, "devices", lambda device_setting: ("cuda:0", "cuda:1"))
    monkeypatch.setattr(devices, "_CHOICE_WAIT_S_MAX", 0.0)
    path = tmp_path / devices._lock_name("choice")

    def identity(device):
        with path.open("a") as file:  # the driver is asked before the lock is taken
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return device[-1]

    monkeypatch.setattr(devices, "gpu_identity", identity)
    with devices.claim_least_busy_device("auto", 1, 1, tmp_path) as device:
        assert device == "cuda:1" and not caplog.text

    monkeypatch.setattr(devices, "gpu_identity", lambda device: device[-1])
    with path.open("a") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with devices.claim_least_busy_device("auto", 3, 1, tmp_path) as device:
            assert device == "cuda:1" and f"{path} is locked" in caplog.text


def test_no_lock_follows_a_link_that_another_user_has_laid(monkeypatch, tmp_path):
    """Names in a folder that all users share can be guessed: a link there would have us open, or make, another file."""
    shared, victim = tmp_path / "tmp", tmp_path / "victim"
    shared.mkdir()
    for name in ("choice", "0.0"):
        (shared / f"larder-{os.getuid()}-{name}.lock").symlink_to(victim)
    monkeypatch.setattr(devices, "devices", lambda device_setting: ("cuda:0", "cuda:1"))
    monkeypatch.setattr(devices, "gpu_identity", lambda device: device[-1])
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))

    with (
        devices.claim_least_busy_device("auto", 0, 1) as first,
        devices.claim_least_busy_device("auto", 0, 1) as second,
    ):
        assert (first, second) == ("cuda:0", "cuda:1")

    assert not victim.exists()
    (lock_folder,) = [path for path in shared.iterdir() if path.is_dir()]
    assert lock_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("laid", ["a link", "a folder for all", "a file"])
def test_a_folder_for_locks_that_others_may_enter_is_named_and_not_used(laid, monkeypatch, tmp_path, caplog):
    elsewhere, lock_folder = tmp_path / "elsewhere", tmp_path / f"larder-{os.getuid()}"
    elsewhere.mkdir()
    if laid == "a link":
        lock_folder.symlink_to(elsewhere)
    elif laid == "a file":
        lock_folder.touch()
    else:
        lock_folder.mkdir()
        lock_folder.chmod(0o777)
    monkeypatch.setattr(devices, "devices", lambda device_setting: ("cuda:0", "cuda:1"))
    monkeypatch.setattr(devices, "gpu_identity", lambda device: device[-1])
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))

    with devices.claim_least_busy_device("auto", 3, 1) as device:
        assert device == "cuda:1"

    assert f"{lock_folder} is not a folder that only this user may enter" in caplog.text
    assert not list(elsewhere.iterdir()) and (lock_folder.is_file() or not list(lock_folder.iterdir()))
