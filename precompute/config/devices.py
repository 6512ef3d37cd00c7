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
"""Device files of NVIDIA's driver, WSL's and AMD's: without any, torch is not imported, which would take seconds."""

_CHOICE_WAIT_S_MAX, _LOCK_POLL_INTERVAL_S = 30.0, 0.02
"""Seconds that a process waits while others choose a device, which takes milliseconds, and between its checks."""

_log = logging.getLogger(__name__)


@functools.cache
def devices(device_setting: str) -> tuple[str, ...]:
    """Return torch's names of the devices to score on; empty for the kernel on the processor.

    `auto` takes all GPUs, `off` none; `cuda`, `cuda:1` and `cpu` (slow: for tests) are required devices. Raises
    ConfigError if a required device is missing.
    """
    if device_setting == OFF or (
        device_setting == AUTO and not any(Path(device_file).exists() for device_file in _GPU_DEVICE_FILES)
    ):
        return ()
    if importlib.util.find_spec("torch") is None:
        if device_setting == AUTO:
            _log.warning("there is a GPU, but torch is not installed: scoring uses the processor (extra `gpu`)")
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
            f"device {device_setting!r} is missing, torch finds {', '.join(visible_devices) or 'no GPU'}: check the "
            "driver, or set device to `off`",
            field="device",
        )
    return selected_devices


def device_for_shard(device_setting: str, shard: int) -> str | None:
    """Return the device of one shard, in round-robin order; None for the processor."""
    device_names = devices(device_setting)
    return device_names[shard % len(device_names)] if device_names else None


@contextmanager
def claim_least_busy_device(
    device_setting: str, shard: int, tasks_max: int = 1, locks_folder: Path | None = None
) -> Iterator[str | None]:
    """Yield the device with the fewest scoring processes on this host; among equals the one in round-robin order.

    A process that scores on a GPU holds a lock, which ends with the process. Up to `tasks_max` processes may share a
    device; if more do, a warning is logged. The locks are in `locks_folder`, by default a folder of this user; if that
    cannot be trusted, the device is chosen in round-robin order.
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
            "processes on GPUs cannot be counted, so this shard uses %s, by its number: %s",
            device_names[round_robin_index],
            error,
        )
        yield device_names[round_robin_index]
        return
    identity_by_device = {
        device_name: gpu_identity(device_name) for device_name in device_names
    }  # the driver may take long to answer, so it is asked before the lock is taken
    with ExitStack() as lock_stack:
        with _lock_file(lock_folder, "choice") as choice_lock_file:
            if not _try_lock(choice_lock_file):  # only one process counts at a time
                _log.warning(
                    "%s is locked for more than %.0f s: end the process that holds it (`fuser`); meanwhile this shard "
                    "uses %s, by its number",
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
                "%d processes score on %s, more than device_tasks (%d): its memory may not suffice",
                len(held_slots_by_device[selected_device]) + 1, selected_device, tasks_max,
            )  # fmt: skip
        yield selected_device


def limit_gpu_memory(device: str, task_count: int) -> int:
    """Limit torch in this process to its share of a GPU's memory; return the bytes per task, 0 without a GPU."""
    if not device.startswith("cuda"):
        return 0
    import torch

    torch.cuda.set_per_process_memory_fraction(1 / task_count, device)
    return int(torch.cuda.get_device_properties(device).total_memory // task_count)


def gpu_identity(device: str) -> str:
    """Return an id of a GPU that is the same in all processes of this host: its UUID, or that of a MIG instance."""
    import torch

    device_index = int(device.partition(":")[2])
    visible_ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device_index < len(visible_ids) and visible_ids[device_index].startswith(("GPU-", "MIG-")):
        return visible_ids[device_index].replace("/", "-")
    return str(torch.cuda.get_device_properties(device).uuid)


def _try_lock(lock_file: IO[str]) -> bool:
    """Return True once this process has the lock; False if another process holds it for too long."""
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
    """Return the slots of a device that living processes hold."""
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
    """Return a folder that only this user may enter, in that of temporary files; raise OSError if there is none."""
    user_folder = Path(tempfile.gettempdir()) / f"larder-{os.getuid()}"
    # Other users can guess its name: a folder or link that one of them made must not be used.
    with suppress(FileExistsError):
        user_folder.mkdir(mode=0o700)
    folder_stat = user_folder.lstat()
    if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.getuid() or folder_stat.st_mode & 0o077:
        raise PermissionError(f"{user_folder} is not a folder that only this user may enter: remove it, or set TMPDIR")
    return user_folder


def _lock_name(lock_stem: str) -> str:
    return f"{lock_stem}.lock"


def _lock_file(lock_folder: Path, lock_stem: str) -> IO[str]:
    return _open_lock_file(lock_folder / _lock_name(lock_stem))


def _open_lock_file(lock_path: Path) -> IO[str]:
    return open(lock_path, "a", opener=_open_without_links)


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
