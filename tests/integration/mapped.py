"""Memory of a process that maps files, as the kernel counts it (`/proc/PID/smaps`)."""

import re
from collections import Counter
from pathlib import Path

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$")


def mapped(pid: int, under: Path) -> dict[str, Counter[str]]:
    """Return kB by counter (Rss, Pss, Private_Clean, ...) for each file under a folder."""
    counters_by_file: dict[str, Counter[str]] = {}
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (head := _HEAD.match(line)) is not None:
            path = head[1]
        elif path.startswith(f"{under}/") and line.endswith(" kB"):
            name, value = line.split(":")
            kb_by_counter = counters_by_file.setdefault(path.removeprefix(f"{under}/"), Counter())
            kb_by_counter[name] += int(value.removesuffix("kB"))
    return counters_by_file


def private_kb(pid: int) -> int:
    """Return the kB that only this process occupies."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB$", text, re.MULTILINE)))
