"""How many cores a process may use, in a container and out of one."""

import os

import pytest

from cache.process.host import usable_cores


def cgroup(tmp_path, lines, **files):
    cgroup_file = tmp_path / "proc/self/cgroup"
    cgroup_file.parent.mkdir(parents=True)
    cgroup_file.write_text(lines)
    for name, text in files.items():
        path = tmp_path / "fs" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "proc", tmp_path / "fs"


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))


def test_affinity_counts_where_nothing_else_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert usable_cores(tmp_path / "nothing", tmp_path) == 96


@pytest.mark.parametrize(("quota", "expected_cores"), [("400000 100000", 4), ("50000 100000", 1), ("max 100000", 96)])
def test_a_pod_has_the_cores_of_its_quota(tmp_path, quota, expected_cores):
    assert usable_cores(*cgroup(tmp_path, "0::/\n", cpu_dot_max=quota)) == expected_cores


def test_the_narrowest_group_around_counts(tmp_path):
    files = {"pods__one__cpu_dot_max": "800000 100000", "pods__cpu_dot_max": "200000 100000"}
    assert usable_cores(*cgroup(tmp_path, "0::/pods/one\n", **files)) == 2


def test_version_1_is_understood(tmp_path):
    files = {"cpu__cpu.cfs_quota_us": "300000\n", "cpu__cpu.cfs_period_us": "100000\n"}
    assert usable_cores(*cgroup(tmp_path, "4:memory:/x\n2:cpu,cpuacct:/x\n0::/\n", **files)) == 3
