"""An import that is killed leaves no folder of which a night could take halves that do not belong together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cache.errors import ConfigError
from precompute.adapters.vectors import from_vectors
from precompute.bundles.bundle_store import chosen_bundle, preview_chosen_bundle
from precompute.config.settings import night_config

IDS, VECTORS = ["a", "b", "c", "d"], np.eye(4, dtype=np.float32)

_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from precompute.adapters import folder
from precompute.adapters.vectors import from_vectors

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

to, step = Path(sys.argv[1]), sys.argv[2]
if step == "before the bundle":
    folder.swap_in_folder = kill
elif step == "after the bundle":
    folder._write_tables = kill
elif step == "between two tables":
    replace = Path.replace
    def replace_one(self, target):
        replace(self, target)
        if Path(target).suffix == ".parquet":
            kill()
    Path.replace = replace_one
else:
    folder.write_import_report = kill
ids, vectors = ["a", "b", "c", "d"], np.eye(4, dtype=np.float32)
from_vectors(ids, 2 * vectors, ids, vectors, to=to)
"""


def run_and_kill(folder: Path, step: str) -> int:
    """Import in a process that kills itself at this step; return its code."""
    return subprocess.run(
        [sys.executable, "-c", _KILLED, str(folder), step], check=False, env={**os.environ}
    ).returncode


@pytest.mark.parametrize("step", ["before the bundle", "after the bundle", "between two tables", "before the report"])
def test_neither_check_nor_night_takes_what_a_killed_import_left(tmp_path: Path, step: str) -> None:
    shop = tmp_path / "shop"
    from_vectors(IDS, VECTORS, IDS, VECTORS, to=shop)
    config = night_config(str(shop / "larder.toml"))

    killed = run_and_kill(shop, step)

    assert killed == -signal.SIGKILL
    for choose in (chosen_bundle, preview_chosen_bundle):
        expected = pytest.raises(ConfigError, match=r"was interrupted or is still running.*run it again")
        with expected, choose(config):
            pass

    from_vectors(IDS, VECTORS, IDS, VECTORS, to=shop)
    with preview_chosen_bundle(config) as bundle:
        assert bundle is not None
    assert not [path.name for path in shop.iterdir() if path.name.startswith(".")]


def test_a_killed_first_import_leaves_nothing_behind_once_it_is_run_again(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    run_and_kill(shop, "before the bundle")
    assert [path for path in shop.iterdir() if path.name.endswith(".part")]

    from_vectors(IDS, VECTORS, IDS, VECTORS, to=shop)

    assert not [path.name for path in shop.iterdir() if path.name.startswith(".")]
