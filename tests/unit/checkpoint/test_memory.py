"""What the tightest limit around this process leaves is what may be taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.checkpoint.memory import available_bytes

GB = 1 << 30


def put(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def node(root: Path, cgroup: str) -> None:
    put(
        root, {"proc/meminfo": f"MemTotal: {16 * GB >> 10} kB\nMemAvailable:   {8 * GB >> 10} kB\n", "proc/self/cgroup": cgroup}
    )


def test_without_limits_it_is_the_nodes(tmp_path: Path) -> None:
    node(tmp_path, "0::/user.slice\n")
    put(tmp_path, {"sys/fs/cgroup/user.slice/memory.max": "max\n"})
    assert available_bytes(tmp_path) == 8 * GB


def test_the_tightest_group_on_the_way_up_counts_and_its_cache_is_free(tmp_path: Path) -> None:
    node(tmp_path, "0::/slurm/job_7/step_0\n")
    job = "sys/fs/cgroup/slurm/job_7"
    put(
        tmp_path,
        {
            f"{job}/memory.max": 4 * GB,
            f"{job}/memory.current": 3 * GB,
            f"{job}/memory.stat": f"anon {2 * GB}\nactive_file {GB // 4}\ninactive_file {GB // 4}\nslab 5\n",
            f"{job}/step_0/memory.max": "max",
        },
    )
    assert available_bytes(tmp_path) == GB + GB // 2


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    node(tmp_path, "9:cpu:/a\n4:memory:/slurm/uid_1/job_7\n0::/\n")
    job = "sys/fs/cgroup/memory/slurm/uid_1/job_7"
    put(
        tmp_path,
        {
            f"{job}/memory.limit_in_bytes": 2 * GB,
            f"{job}/memory.usage_in_bytes": 3 * GB,
            f"{job}/memory.stat": "total_inactive_file 10\ninactive_file 99\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        },
    )
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize("text", ["", "MemAvailable: much\n"])
def test_unknown_is_not_plenty(tmp_path: Path, text: str) -> None:
    put(tmp_path, {"proc/meminfo": text})
    assert available_bytes(tmp_path) is None


def test_this_machine_says_something() -> None:
    assert (available_bytes() or 0) > 0
