"""This checkout's programs as those of a newer release: `python -m tests.upgrade.newer "manifest=2" precompute night`.

The version given is written, and read beside the older ones. Tests run it; no product has such a switch.
"""

import runpy
import sys

from cache.formats import FORMATS


def main() -> None:
    """Raise the version before any other module of Larder is imported."""
    name, _, version = sys.argv[1].partition("=")
    FORMATS[name] = FORMATS[name]._replace(written_version=int(version), newest_readable_version=int(version))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
