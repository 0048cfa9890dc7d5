import math

import pytest

from cupyrec import control_groups


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V1 = "sys/fs/cgroup/cpu/"
MEMORY = "sys/fs/cgroup/memory/"
V2 = "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {V2 + "cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {V2 + "cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {V2 + "a/cpu.max": "150000 50000", V2 + "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {V2 + "a/cpu.max": "9 1", V2 + "a/b/cpu.max": "5 10"}, 0.5),
        ("0::/../x\n", {V2 + "cpu.max": "2 1"}, 2),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a\n0::/\n",
            {V1 + "a/cpu.cfs_quota_us": "400", V1 + "a/cpu.cfs_period_us": "100"},
            4,
        ),
        (
            "2:cpu,cpuacct:/not/seen/from/here\n",
            {V1 + "cpu.cfs_quota_us": "400\n", V1 + "cpu.cfs_period_us": "100\n"},
            4,
        ),
        ("1:cpu:/\n", {V1 + "cpu.cfs_quota_us": "-1", V1 + "cpu.cfs_period_us": "100"}, math.inf),
    ],
)
def test_cores(tmp_path, groups, files, cores):
    write(tmp_path, {"proc/self/cgroup": groups, **files})
    assert control_groups.cores(tmp_path) == cores


def test_nothing_is_limited_where_there_are_no_groups(tmp_path):
    assert control_groups.cores(tmp_path) == math.inf
    assert control_groups.memory(tmp_path) == math.inf


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {V2 + "memory.max": "max\n"}, math.inf),
        ("0::/a/b\n", {V2 + "a/memory.max": "4096", V2 + "a/b/memory.max": "max"}, 4096),
        ("2:memory:/a\n1:cpu:/\n", {MEMORY + "a/memory.limit_in_bytes": "8192\n"}, 8192),
        ("2:memory:/\n", {MEMORY + "memory.limit_in_bytes": str(2**63 - 4096)}, math.inf),
        ("2:memory:/\n", {MEMORY + "memory.limit_in_bytes": "?"}, math.inf),
        ("no line of the kernel's\n", {V2 + "memory.max": "4096"}, math.inf),
    ],
)
def test_memory(tmp_path, groups, files, limit):
    write(tmp_path, {"proc/self/cgroup": groups, **files})
    assert control_groups.memory(tmp_path) == limit
