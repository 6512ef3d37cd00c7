"""What a host has left is the machine's, or what the tightest cgroup above this process leaves of its limit."""

from pathlib import Path

import pytest

from cache.process.host import disk_free_bytes, memory_available_bytes

MIB = 1 << 20
NO_LIMIT = 9_223_372_036_854_771_712
"""What version 1 says where there is none."""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 100 MiB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900000 kB\nMemAvailable:  102400 kB\n")
    return tmp_path / "proc"


def limit(folder: Path, names: tuple[str, str, str, str], *values: int | str) -> None:
    """Write what a cgroup says: limit, usage, cached files and shared memory."""
    folder.mkdir(parents=True, exist_ok=True)
    allowed, used, cached, shared = values
    (folder / names[0]).write_text(f"{allowed}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n{names[3]} {shared}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
V2 = ("memory.max", "memory.current", "file", "shmem")


def test_a_machine_without_groups_has_what_is_available(proc: Path, tmp_path: Path) -> None:
    assert memory_available_bytes(proc, tmp_path / "none") == 100 * MIB
    assert memory_available_bytes(tmp_path / "none", tmp_path / "none") > MIB


def test_a_container_has_what_its_limit_leaves_cached_files_included(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    limit(tmp_path / "groups", V2, 50 * MIB, 40 * MIB, 25 * MIB, 5 * MIB)

    assert memory_available_bytes(proc, tmp_path / "groups") == 30 * MIB


def test_the_tightest_group_above_a_process_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/pods/one/serving\n")
    groups = tmp_path / "groups"
    limit(groups / "pods/one/serving", V2, "max", 9 * MIB, 0, 0)
    limit(groups / "pods/one", V2, 20 * MIB, 9 * MIB, 0, 0)
    limit(groups / "pods", V2, 80 * MIB, 30 * MIB, 0, 0)

    assert memory_available_bytes(proc, groups) == 11 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_version_1_is_read_where_the_container_sees_only_the_root(proc: Path, tmp_path: Path, path: str) -> None:
    (proc / "self/cgroup").write_text(f"12:cpu,cpuacct:{path}\n7:memory:{path}\n")
    limit(tmp_path / "groups/memory", V1, 64 * MIB, 60 * MIB, 10 * MIB, 0)

    assert memory_available_bytes(proc, tmp_path / "groups") == 14 * MIB

    limit(tmp_path / "groups/memory", V1, NO_LIMIT, 60 * MIB, 10 * MIB, 0)

    assert memory_available_bytes(proc, tmp_path / "groups") == 100 * MIB


def test_what_a_group_says_in_no_numbers_is_no_limit(proc: Path, tmp_path: Path) -> None:
    limit(tmp_path / "groups", V2, "lots", 1, 0, 0)

    assert memory_available_bytes(proc, tmp_path / "groups") == 100 * MIB


def test_the_disk_of_a_folder_yet_to_be_made_is_that_of_the_one_above(tmp_path: Path) -> None:
    free_bytes = disk_free_bytes(tmp_path / "not/yet")

    assert free_bytes == pytest.approx(disk_free_bytes(tmp_path), abs=64 * MIB) and free_bytes > 0
