"""Devices for scoring: the GPUs that torch sees, or the processor. torch is imported only if a GPU may be used."""

import fcntl
import functools
import importlib.util
import itertools
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from cache.errors import ConfigError

AUTO, OFF = "auto", "off"

_GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's driver, WSL's and AMD's: importing torch just to find no GPU takes seconds."""

_CHOICE_WAIT_S_MAX, _LOCK_POLL_INTERVAL_S = 30.0, 0.02
"""Seconds that a process waits for others to choose, which takes milliseconds, and between its checks."""

_log = logging.getLogger(__name__)


@functools.cache
def devices(device_setting: str) -> tuple[str, ...]:
    """Return torch's names of the devices to score on; none means the processor's own kernel.

    `auto` takes all GPUs there are, `off` none; `cuda`, `cuda:1` and `cpu` (slow: for tests) are demanded. Raises
    ConfigError if a demanded device is missing.
    """
    if device_setting == OFF or (
        device_setting == AUTO and not any(Path(device_file).exists() for device_file in _GPU_DEVICE_FILES)
    ):
        return ()
    if importlib.util.find_spec("torch") is None:
        if device_setting == AUTO:
            _log.warning("there is a GPU, but no torch: scoring uses the processor (extra `gpu`)")
            return ()
        raise ConfigError(
            f"device {device_setting!r} needs torch: install the extra `gpu`, or set device to `off`", field="device"
        )
    if device_setting == "cpu":
        return ("cpu",)
    import torch

    visible_devices = tuple(f"cuda:{device_index}" for device_index in range(torch.cuda.device_count()))
    selected_devices = tuple(
        device_name for device_name in visible_devices if device_setting in (AUTO, "cuda", device_name)
    )
    if not selected_devices and device_setting != AUTO:
        raise ConfigError(
            f"device {device_setting!r} is not there, torch sees {', '.join(visible_devices) or 'no GPU'}: check the "
            "driver, or set "
            "device to `off`",
            field="device",
        )
    return selected_devices


def device_for_shard(device_setting: str, shard: int) -> str | None:
    """Return the device of one shard: several GPUs take the shards in turn. None means the processor."""
    device_names = devices(device_setting)
    return device_names[shard % len(device_names)] if device_names else None


@contextmanager
def claim_least_busy_device(
    device_setting: str, shard: int, tasks_max: int = 1, locks_folder: Path | None = None
) -> Iterator[str | None]:
    """Yield the device with the fewest scoring processes on this host; among equals the shard's own in turn.

    A process that scores on a GPU holds a lock, so a killed one leaves nothing behind. `tasks_max` is how many may
    share a device; more than that share it, too, and the log says so. The locks are in `locks_folder`, by default one
    of this user's own; if that cannot be trusted, the shard takes its turn's device.
    """
    device_names = devices(device_setting)
    if not device_names or not device_names[0].startswith("cuda"):
        yield device_for_shard(device_setting, shard)
        return
    round_robin_index = shard % len(device_names)
    try:
        lock_folder = locks_folder or _user_lock_folder()
    except OSError as error:
        _log.warning(
            "GPUs are not counted, and this shard takes its turn's, %s: %s", device_names[round_robin_index], error
        )
        yield device_names[round_robin_index]
        return
    identity_by_device = {
        device_name: gpu_identity(device_name) for device_name in device_names
    }  # by the driver: nobody waits for it
    with ExitStack() as lock_stack:
        with _lock_file(lock_folder, "choice") as choice_lock_file:
            if not _try_lock(choice_lock_file):  # no two count at once
                _log.warning(
                    "%s is locked for more than %.0f s: end who holds it (`fuser`); scoring on %s meanwhile, its turn",
                    choice_lock_file.name, _CHOICE_WAIT_S_MAX, device_names[round_robin_index],
                )  # fmt: skip
                yield device_names[round_robin_index]
                return
            held_slots_by_device = {
                device_name: _held_slots(lock_folder, identity_by_device[device_name])
                for device_name in (*device_names[round_robin_index:], *device_names[:round_robin_index])
            }
            selected_device = min(held_slots_by_device, key=lambda device_name: len(held_slots_by_device[device_name]))
            free_slot = next(
                slot_number
                for slot_number in itertools.count()
                if slot_number not in held_slots_by_device[selected_device]
            )
            slot_lock_file = lock_stack.enter_context(
                _lock_file(lock_folder, _slot_stem(identity_by_device[selected_device], free_slot))
            )
            fcntl.flock(slot_lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if len(held_slots_by_device[selected_device]) >= tasks_max:
            _log.warning(
                "%d processes score on %s, and device_tasks is %d: memory is not shared out among so many",
                len(held_slots_by_device[selected_device]) + 1, selected_device, tasks_max,
            )  # fmt: skip
        yield selected_device


def limit_gpu_memory(device: str, task_count: int) -> int:
    """Limit torch in this process to its share of a GPU's memory; return the bytes per task, 0 off GPUs."""
    if not device.startswith("cuda"):
        return 0
    import torch

    torch.cuda.set_per_process_memory_fraction(1 / task_count, device)
    return int(torch.cuda.get_device_properties(device).total_memory // task_count)


def gpu_identity(device: str) -> str:
    """Return a GPU's name that is the same in all processes of this host: its UUID, or that of a MIG instance."""
    import torch

    device_index = int(device.partition(":")[2])
    visible_ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device_index < len(visible_ids) and visible_ids[device_index].startswith(("GPU-", "MIG-")):
        return visible_ids[device_index].replace("/", "-")
    return str(torch.cuda.get_device_properties(device).uuid)


def _try_lock(lock_file: IO[str]) -> bool:
    """True once this process has the lock; False if another one holds it for too long."""
    give_up_at = time.monotonic() + _CHOICE_WAIT_S_MAX
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(_LOCK_POLL_INTERVAL_S)
        else:
            return True


def _held_slots(lock_folder: Path, device_identity: str) -> set[int]:
    """Return the slots of a device of this name that living processes hold."""
    occupied_slots = set()
    for lock_path in lock_folder.glob(_lock_name(_slot_stem(device_identity, "*"))):
        with _open_lock_file(lock_path) as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                occupied_slots.add(int(lock_path.stem.rpartition(".")[2]))
    return occupied_slots


def _slot_stem(device_identity: str, slot_number: int | str) -> str:
    return f"{device_identity}.{slot_number}"


def _user_lock_folder() -> Path:
    """Return a folder that only this user may enter, below the shared one for temporary files; raise OSError."""
    user_folder = Path(tempfile.gettempdir()) / f"larder-{os.getuid()}"
    # Its name is no secret: who made it first decides where it leads, and what lies in it.
    with suppress(FileExistsError):
        user_folder.mkdir(mode=0o700)
    folder_stat = user_folder.lstat()
    if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.getuid() or folder_stat.st_mode & 0o077:
        raise PermissionError(f"{user_folder} is no folder that this user alone may enter: remove it, or set TMPDIR")
    return user_folder


def _lock_name(lock_stem: str) -> str:
    return f"{lock_stem}.lock"


def _lock_file(lock_folder: Path, lock_stem: str) -> IO[str]:
    return _open_lock_file(lock_folder / _lock_name(lock_stem))


def _open_lock_file(lock_path: Path) -> IO[str]:
    return open(lock_path, "a", opener=_open_without_links)


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
