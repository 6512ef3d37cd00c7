"""A whole drawn night, begin to retire, on a device: the seconds of each step, and the step that takes longest.

Nothing is compared: it says where a night's time goes. LARDER_DEVICE chooses the device, `off` the processor's kernel.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from cache.process.redis_server import join_or_start_server
from precompute.config.devices import devices
from precompute.steps.night import Night, run_night
from tests.bench.device.drawn import DATA_UNTIL, drawn_config
from tests.bench.device.shard import SIZES
from tests.bench.tools.harness import Report, parse


def main() -> None:
    """Run one night and report."""
    options = parse(__doc__.splitlines()[0])
    report = Report("whole_night", ("torch", "onnxruntime", "faiss-cpu", "redis"))
    device = os.environ.get("LARDER_DEVICE", "auto")
    device_names = devices(device)
    is_small = device_names == ("cpu",) or (options.quick and not device_names)
    size = SIZES["processor" if is_small else "gpu quick" if options.quick else "gpu"]
    with TemporaryDirectory(prefix="larder-bench-") as folder_name:
        folder = Path(folder_name)
        (folder / "redis").mkdir()
        with join_or_start_server(folder / "redis") as running:
            config = drawn_config(folder, size, device, redis_url=running.url)
            steps = run_night(Night(config, "bench", DATA_UNTIL))
    seconds = {name: spent for name, _, spent in steps}
    report.figures |= {
        "device": device_names[0] if device_names else "processor",
        "users": size.users,
        "items": size.items,
        "dims": size.dims,
        **{f"{name}_s": round(spent, 2) for name, spent in seconds.items()},
        "limiting_step": max(seconds, key=seconds.__getitem__),
    }
    report.show(options)


if __name__ == "__main__":
    main()
