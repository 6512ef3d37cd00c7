"""`python -m tests.fuzz.again EXTENSION FILE`: run the functions on an input that a fuzzer wrote to a file."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.build import FOLDERS, build_fuzzable, environment, find_clang


def main(argv: list[str]) -> int:
    """Build and run; return the exit code of the run."""
    extension = next(extension_name for extension_name in FOLDERS if extension_name == argv[0])
    clang = find_clang()
    if clang is None:
        print("no clang with libFuzzer here")
        return 2
    built = build_fuzzable(clang, extension, Path(tempfile.mkdtemp(prefix="larder-fuzz-")))
    command = [sys.executable, "-m", "tests.fuzz", extension, str(built), argv[1]]
    return subprocess.run(command, env=environment(clang.asan), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
