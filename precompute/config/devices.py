"""Devices for scoring: the GPUs that torch sees, or the processor. torch is imported only where it is wanted."""

import fcntl
import functools
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from cache.errors import ConfigError

AUTO, OFF = "auto", "off"

_SIGNS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's driver, WSL's and AMD's: importing torch just to find no GPU takes seconds."""

_log = logging.getLogger(__name__)


@functools.cache
def devices(wanted: str) -> tuple[str, ...]:
    """torch's names of the devices to score on; none means the processor's own kernel.

    `auto` takes all GPUs there are, `off` none; `cuda`, `cuda:1` and `cpu` (slow: for tests) are demanded. Raises
    ConfigError where what is demanded is not there.
    """
    if wanted == OFF or (wanted == AUTO and not any(Path(each).exists() for each in _SIGNS)):
        return ()
    if importlib.util.find_spec("torch") is None:
        if wanted == AUTO:
            _log.warning("there is a GPU, but no torch: scoring uses the processor (extra `gpu`)")
            return ()
        raise ConfigError(
            f"device {wanted!r} needs torch: install the extra `gpu`, or set device to `off`",
            field="device",
        )
    if wanted == "cpu":
        return ("cpu",)
    import torch

    found = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    chosen = tuple(each for each in found if wanted in (AUTO, "cuda", each))
    if not chosen and wanted != AUTO:
        raise ConfigError(
            f"device {wanted!r} is not there, torch sees {', '.join(found) or 'no GPU'}: check the driver, or set "
            "device to `off`",
            field="device",
        )
    return chosen


def device_of(wanted: str, shard: int) -> str | None:
    """The device of one shard: several GPUs take the shards in turn. None means the processor."""
    found = devices(wanted)
    return found[shard % len(found)] if found else None


@contextmanager
def least_busy(wanted: str, shard: int, folder: Path | None = None) -> Iterator[str | None]:
    """The device of one shard of many processes on this host: its own turn's unless that one is taken and another free.

    Taken is what a living process holds a lock of, so nothing is left behind by one that was killed. Where all are
    taken, several share one.
    """
    found = devices(wanted)
    if len(found) < 2:
        yield device_of(wanted, shard)
        return
    turn = shard % len(found)
    with ExitStack() as held:
        for device in (*found[turn:], *found[:turn]):
            file = held.enter_context(_lock_file(device, folder or Path(tempfile.gettempdir())))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield device
            return
        yield found[turn]


def _lock_file(device: str, folder: Path) -> IO[str]:
    path = folder / f"larder-{os.getuid()}-{device.replace(':', '-')}.lock"
    return path.open("a")
