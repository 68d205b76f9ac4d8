"""Every check on at least five inputs: ok, fail, unknown, hang, garbage; the cited ones are from public reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.hooks import checks, child, engine
from slurm_resilience.hooks.admin.conformance import Case, answer, kernel_log, machine, tool, tool_by_argument
from slurm_resilience.hooks.checks import clock, cpu, filesystem, infiniband, leftovers, oom, processes, xid
from tests.unit.hooks.device_cases import DEVICES, limit, port_files
from tests.unit.hooks.ticks import age_files

Make = Callable[[Path], Case]
GPUS = "".join(f"{index}, GPU-0000000{index}, None\n" for index in range(4))
CPUS_20000 = "".join(f"processor\t: {index}\nmodel name\t: x\n\n" for index in range(20000))
CHRONY = "A9FEA97B,169.254.169.123,4,1796001234.1,{off},0.000002,0.00001,-1.2,0.001,0.02,0.0003,0.0001,16.2,{leap}"
XID79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def smi(says: str = "", **how: Any) -> Make:
    def make(tmp: Path) -> Case:
        return Case({"count": 4, "nvidia_smi": str(tool(tmp / "nvidia-smi", says, **how))}, timeout_s=limit(how))

    return make


def old_smi(tmp: Path) -> Case:
    """A driver before R570, which knows no recovery action."""
    path = tool_by_argument(
        tmp / "nvidia-smi",
        {
            "gpu_recovery_action": ('Field "gpu_recovery_action" is not a valid field to query.\n', 2),
            "index,uuid": ("".join(f"{i}, GPU-{i}\n" for i in range(4)), 0),
        },
    )
    return Case({"count": 4, "nvidia_smi": str(path)})


def files(options: dict[str, Any] | None = None, /, **texts: str | None) -> Make:
    names = {
        "meminfo": "/proc/meminfo", "online": "/sys/devices/system/cpu/online", "cpuinfo": "/proc/cpuinfo",
        "mounts": "/proc/self/mountinfo", "kmsg": "/dev/kmsg", "ue": "/sys/devices/system/edac/mc/mc0/ue_count",
        "ce": "/sys/devices/system/edac/mc/mc0/ce_count",
    }  # fmt: skip

    def make(tmp: Path) -> Case:
        root = machine(tmp / "machine", {names[name]: text for name, text in texts.items()})
        (root / "scratch").mkdir()
        return Case(options or {}, root=str(root))

    return make


def nowhere(options: dict[str, Any] | None = None) -> Make:
    def make(tmp: Path) -> Case:
        (tmp / "empty").mkdir()
        return Case(options or {}, root=str(tmp / "empty"))

    return make


def chrony(says: str = "", **how: Any) -> Make:
    return lambda tmp: Case({"chronyc": str(tool(tmp / "chronyc", says, **how))}, timeout_s=limit(how))


def mount(point: str, flags: str = "rw") -> str:
    return f"36 35 98:0 / {point} {flags},noatime - ext4 /dev/sda1 {flags}\n"


SCRATCH = {"paths": [{"path": "/scratch", "mount": True}]}
TABLE: list[tuple[str, str, Make, str, str]] = [
    # check, what, input, status, part of the text
    ("gpu", "ok", smi(GPUS), "ok", "4 GPUs"),
    ("gpu", "three of four", smi(GPUS[: GPUS.index("3,")]), "fail", "3 of 4"),
    ("gpu", "wants a reset", smi(GPUS.replace("None", "Reset", 1)), "fail", "GPU 0 asks for: Reset"),
    ("gpu", "lost", smi("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n", code=15), "fail", "lost"),
    ("gpu", "none at all", smi("No devices were found\n", code=6), "fail", "no GPU"),
    ("gpu", "not installed", lambda tmp: Case({"count": 4, "nvidia_smi": str(tmp / "none")}), "unknown", "cannot run"),
    ("gpu", "hangs (cluster-toolkit#6230)", smi(hangs=True), "unknown", "no answer"),
    ("gpu", "garbage", smi("<html>\x00 oops, 7\n"), "unknown", "form"),
    ("gpu", "an action nobody knows (autopilot#68)", smi(GPUS.replace("None", "Sacrifice", 1)), "unknown", "do not know"),
    ("gpu", "5 MB", smi(GPUS, floods_bytes=5_000_000), "unknown", "form"),
    ("gpu", "an older driver", old_smi, "ok", "4 GPUs"),
    ("gpu", "idle: utilisation is not asked for (slurm-gcp#223)", smi(GPUS), "ok", ""),
    ("gpu_memory", "ok", smi("GPU-1, No, No\nGPU-2, No, No\n"), "ok", "2 GPUs"),
    ("gpu_memory", "no spares", smi("GPU-1, No, Yes\n"), "fail", "no spare"),
    ("gpu_memory", "pending (nvidia: GPU memory error management)", smi("GPU-1, Yes, No\n"), "warn", "reset"),
    ("gpu_memory", "fails", smi("", code=9), "unknown", ""),
    ("gpu_memory", "hangs", smi(hangs=True), "unknown", "no answer"),
    ("gpu_memory", "garbage", smi("GPU-1, maybe, No\n"), "unknown", "maybe"),
    ("memory", "ok", files({"real_memory_mb": 1000}, meminfo="MemTotal:  2048000 kB\nMemFree: 1 kB\n"), "ok", "2000 MB"),
    ("memory", "a DIMM less", files({"real_memory_mb": 4000}, meminfo="MemTotal:  2048000 kB\n"), "fail", "2000 MB of 4000"),
    ("memory", "nothing there", nowhere({"real_memory_mb": 1}), "unknown", ""),
    ("memory", "hangs", files({"real_memory_mb": 1}, meminfo=None), "unknown", ""),
    ("memory", "garbage", files({"real_memory_mb": 1}, meminfo="MemTotal: many kB\n"), "unknown", ""),
    ("memory", "a tolerance, since firmware takes some (slurm.conf: RealMemory)",
     files({"real_memory_mb": 2040, "tolerance_percent": 3}, meminfo="MemTotal:  2048000 kB\n"), "ok", ""),
    ("cpu", "ok", files({"count": 8}, online="0-3,8-11\n"), "ok", "8 CPUs"),
    ("cpu", "one is off", files({"count": 8}, online="0-2,4-7\n"), "fail", "7 of 8"),
    ("cpu", "nothing there", nowhere({"count": 8}), "unknown", ""),
    ("cpu", "hangs", files({"count": 8}, online=None), "unknown", ""),
    ("cpu", "garbage", files({"count": 8}, online="all of them\n"), "unknown", "all of them"),
    ("cpu", "20,000 CPUs (nhc#30)", files({"count": 20000}, cpuinfo=CPUS_20000), "ok", "20000 CPUs"),
    ("filesystem", "ok", files(SCRATCH, mounts=mount("/") + mount("/scratch")), "ok", ""),
    ("filesystem", "not mounted", files(SCRATCH, mounts=mount("/")), "fail", "not mounted"),
    ("filesystem", "read-only (nhc's first check)", files(SCRATCH, mounts=mount("/scratch", "ro")), "fail", "read-only"),
    ("filesystem", "stale handle", lambda tmp: Case({"paths": ["/gone"]}, root=str(
        machine(tmp / "m", {"/proc/self/mountinfo": mount("/")}))), "fail", "/gone"),
    ("filesystem", "full is the job's doing", files({"paths": [{"path": "/scratch", "free_percent": 101}]}, mounts=mount("/")),
     "warn", "free"),
    ("filesystem", "nothing there", nowhere(SCRATCH), "unknown", ""),
    ("filesystem", "hangs", files(SCRATCH, mounts=None), "unknown", ""),
    ("filesystem", "garbage", files(SCRATCH, mounts="a b c\n- - -\n"), "unknown", ""),
    ("memory_errors", "ok", files(ue="0\n", ce="3\n"), "ok", ""),
    ("memory_errors", "uncorrected", files(ue="1\n", ce="0\n"), "fail", "uncorrected"),
    ("memory_errors", "many corrected (nhc's limit is 9 a check)", files(ue="0\n", ce="20000\n"), "warn", "20000"),
    ("memory_errors", "no controller", nowhere(), "ok", ""),
    ("memory_errors", "unreadable", files(ue="0\n"), "unknown", ""),
    ("memory_errors", "hangs", files(ue="0\n", ce=None), "unknown", ""),
    ("memory_errors", "garbage", files(ue="0\n", ce="-1\n"), "unknown", ""),
    ("clock", "ok", chrony(CHRONY.format(off="0.000013", leap="Normal")), "ok", ""),
    ("clock", "far off (munge's limit is 300 s)", chrony(CHRONY.format(off="-170.1", leap="Normal")), "fail", "170.1"),
    ("clock", "a little off", chrony(CHRONY.format(off="1.5", leap="Normal")), "warn", "1.5"),
    ("clock", "not synchronised", chrony(CHRONY.format(off="0.0", leap="Not synchronised")), "warn", "not"),
    ("clock", "no daemon", chrony("506 Cannot talk to daemon\n", code=1), "unknown", "506"),
    ("clock", "hangs", chrony(hangs=True), "unknown", "no answer"),
    ("clock", "garbage", chrony("ref,ok,yes\n"), "unknown", "form"),
    ("oom", "ok", files(kmsg=kernel_log(["all is well"])), "ok", ""),
    ("oom", "a job's", files(kmsg=kernel_log(["Memory cgroup out of memory: Killed process 77 (python3) total-vm:1kB"])),
     "warn", "python3"),
    ("oom", "the node's", files(kmsg=kernel_log(["Out of memory: Killed process 77 (slurmd) total-vm:1kB"])), "warn", "slurmd"),
    ("oom", "no log", nowhere(), "unknown", ""),
    ("oom", "hangs", files(kmsg=None), "unknown", ""),
    ("oom", "garbage", files(kmsg="not a record\n;;;\n\x00\n"), "ok", ""),
    ("oom", "an older kernel's words (kernel before 4.20)",
     files(kmsg=kernel_log(["Out of memory: Kill process 9 (a.out) score 900 or sacrifice child"])), "warn", "a.out"),
    ("xid", "ok", files(kmsg=kernel_log(["NVRM: loading"])), "ok", ""),
    ("xid", "79: off the bus", files(kmsg=kernel_log([XID79])), "fail", "XID 79"),
    ("xid", "31: the application's", files(kmsg=kernel_log(["NVRM: Xid (PCI:0000:3b:00): 31, MMU"])), "warn", "31"),
    ("xid", "45 eleven thousand times (NVSentinel#1748)",
     files(kmsg=kernel_log(["NVRM: Xid (PCI:0000:3b:00): 45, pid=1, Ch 00000010"] * 11760)), "ok", ""),
    ("xid", "145 that says Nonfatal (NVSentinel#1357)",
     files(kmsg=kernel_log(["NVRM: Xid (PCI:0018:01:00): 145, Nonfatal XC0"])), "warn", "145"),
    ("xid", "145 that does not", files(kmsg=kernel_log(["NVRM: Xid (PCI:0018:01:00): 145, Fatal"])), "fail", "145"),
    ("xid", "a code nobody knows", files(kmsg=kernel_log(["NVRM: Xid (PCI:0000:3b:00): 999, x"])), "warn", "do not know"),
    ("xid", "written by root's tools, not by the kernel", files(kmsg=kernel_log([XID79], facility=1)), "ok", ""),
    ("xid", "no log", nowhere(), "unknown", ""),
    ("xid", "hangs", files(kmsg=None), "unknown", ""),
    ("xid", "garbage", files(kmsg="NVRM: Xid (PCI:0000:3b:00): 79, no record\n"), "ok", ""),
    ("xid", "a user's file of that name, which the kernel tells of when its program crashes",
     files(kmsg=kernel_log([f"a[7]: segfault at 0 ip 0 sp 0 error 4 in {XID79}[400000+1000]"])), "ok", ""),
    ("oom", "a user's file of that name", files(kmsg=kernel_log([
        "a[7]: segfault at 0 ip 0 sp 0 error 4 in Out of memory: Killed process 77 (slurmd) x[400000+1000]"])), "ok", ""),
    ("oom", "a user's process that calls itself slurmd", files(kmsg=kernel_log([
        "Out of memory: Killed process 77 (slurmd) total-vm:1kB, anon-rss:1kB, UID:2001 pgtables:1kB"])), "warn", "ran out"),
    *DEVICES,
]  # fmt: skip


@pytest.mark.parametrize(("check", "what", "make", "status", "text"), TABLE, ids=[f"{row[0]}: {row[1]}" for row in TABLE])
def test_a_check_answers(check: str, what: str, make: Make, status: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    started = time.monotonic()
    result = answer(check, make(tmp_path), tmp_path / "state")
    assert (result.status, text in result.text) == (status, True), result.to_dict()
    assert time.monotonic() - started < 60.0
    assert result.status != "unknown" or result.blame == "unknown"


@pytest.mark.parametrize("name", sorted(set(checks.ALL) - {"leftovers", "tmpfiles"}))
def test_each_check_has_five_inputs_one_of_them_cited(name: str) -> None:
    rows = [row for row in TABLE if row[0] == name]
    assert len(rows) >= 5
    assert {"ok", "unknown"} <= {row[3] for row in rows}
    assert {"fail", "warn"} & {row[3] for row in rows}
    assert {"hangs", "garbage"} <= {row[1].split(" (")[0] for row in rows}
    assert any("(" in row[1] for row in rows), "cite a public report or a vendor's document"


# --- XID: the cursor, what lasts, what acknowledges ---


def log(root: Path, lines: list[str], first: int = 100) -> None:
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev" / "kmsg").write_text(kernel_log(lines, first=first))


def test_an_xid_counts_once_and_lasts_until_the_driver_says_that_nothing_is_needed(tmp_path: Path) -> None:
    """azurehpc#648: one old line must not drain for ever."""
    log(tmp_path, [XID79])
    assert answer("xid", Case({}, root=str(tmp_path)), tmp_path).status == "fail"
    assert answer("xid", Case({}, root=str(tmp_path)), tmp_path).status == "fail", "nothing has been done about it"
    healthy = tool(tmp_path / "nvidia-smi", "0, None\n1, None\n")
    assert answer("xid", Case({"nvidia_smi": str(healthy)}, root=str(tmp_path)), tmp_path).status == "ok"
    assert answer("xid", Case({}, root=str(tmp_path)), tmp_path).status == "ok", "the line is still in the log, and old"
    log(tmp_path, [XID79, XID79])
    assert answer("xid", Case({}, root=str(tmp_path)), tmp_path).status == "fail", "a new one is a new one"


def test_an_xid_of_last_week_is_of_another_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path, [XID79])
    assert answer("xid", Case({}, root=str(tmp_path)), tmp_path).status == "fail"
    log(tmp_path, ["a new boot"], first=1)
    monkeypatch.setattr(xid, "boot_id", lambda: "another")
    assert answer("xid", Case({}, root=str(tmp_path)), tmp_path).status == "ok"


def test_the_worst_xid_counts(tmp_path: Path) -> None:
    lines = ["NVRM: Xid (PCI:0000:3b:00): 31, a", XID79, "NVRM: Xid (PCI:0000:3b:00): 63, row remap"]
    assert xid.judge(lines).severity == "drain_now"
    assert xid.judge([]).status == "ok"
    assert oom.judge([]).status == "ok"


def test_no_xid_is_in_two_columns_of_the_table() -> None:
    groups = [xid.APPLICATION, xid.NOTICE, xid.DRAIN, xid.DRAIN_AT_ONCE]
    assert sum(map(len, groups)) == len(frozenset().union(*groups))


# --- flaps are counted within a window ---


def test_a_port_that_loses_its_link_again_and_again_is_flagged_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """soperator#481: the counter grows since boot, so only what it has grown by lately counts."""
    now = [1000.0]
    monkeypatch.setattr("slurm_resilience.hooks.checks.infiniband.time.monotonic", lambda: now[0])
    memo = str(tmp_path / "memo.json")

    def look(downed: int, after_s: float) -> Any:
        now[0] += after_s
        machine(tmp_path / "m", port_files(link_downed=f"{downed}\n"))
        options = {"ports": ["mlx5_0:1"], "flaps": 5, "window_s": 3600}
        return infiniband.check(checks.Host(options, now[0] + 9, str(tmp_path / "m"), memo=memo))

    assert look(40, 0).status == "ok", "what was before we first looked is nobody's fault now"
    assert look(44, 600).status == "ok"
    flagged = look(45, 600)
    assert (flagged.status, flagged.severity, flagged.blame) == ("fail", "flag", "fabric")
    assert "5 times" in flagged.text
    assert look(45, 3601).status == "ok", "an hour without one"
    assert look(49, 7200).status == "ok", "four since the last look"
    monkeypatch.setattr(infiniband, "boot_id", lambda: "another")
    assert look(90, 60).status == "ok", "another boot starts anew"
    (tmp_path / "memo.json").write_text('{"samples": [["x"], 7, [1, {"mlx5_0:1": "y"}]]}')
    assert look(91, 60).status == "ok", "a torn memory is none"


# --- clock, mounts, numbers ---


def test_a_jump_of_the_clock_is_seen_by_the_clock_that_does_not_jump(tmp_path: Path) -> None:
    import json

    assert answer("clock", Case({}), tmp_path).status == "ok"
    memo = tmp_path / "memo-clock.json"
    told = json.loads(memo.read_text())
    memo.write_text(json.dumps({**told, "wall": told["wall"] - 3600}))
    result = answer("clock", Case({}), tmp_path)
    assert result.status == "warn"
    assert "jumped by 3600 s" in result.text
    assert clock.judge("", 1, 1).status == "unknown"


def test_cpu_lists() -> None:
    assert [cpu.count(text) for text in ("0", "0-3,8", "3-1", "x", "1-", "")] == [1, 5, None, None, None, None]


def test_mount_points_with_spaces_are_names_too() -> None:
    assert list(filesystem.mounted(mount("/my\\040disk"))) == ["/my disk"]


# --- what the job left behind ---


def process(root: Path, pid: int, uid: int, job: str, *, name: str = "python", by: str = "environ") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    rest = " ".join(["S", "1", *["0"] * 17, str(pid * 10), "0"])
    (folder / "stat").write_text(f"{pid} ({name}) {rest}\n")
    (folder / "status").write_text(f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (folder / "cgroup").write_text(f"0::/system.slice/slurmstepd.scope/job_{job}/step_0\n" if by == "cgroup" else "0::/\n")
    (folder / "environ").write_text(f"A=1\0SLURM_JOB_ID={job}\0" if by == "environ" else "A=1\0")


def squeue(tmp: Path, says: str, **how: Any) -> str:
    return str(tool(tmp / "squeue", says, **how))


@pytest.mark.parametrize("by", ["cgroup", "environ"])
def test_only_the_ended_jobs_processes_are_left_over(by: str, tmp_path: Path) -> None:
    """deepops#992, #1407: two jobs of one user, one ends; the other's processes live."""
    process(tmp_path, 50, 2001, "7", by=by)
    process(tmp_path, 51, 2001, "8", by=by)
    process(tmp_path, 52, 2002, "7", by=by, name="'; reboot; ') R 1")
    result = answer("leftovers", Case({}, root=str(tmp_path), job="7", uid=2001), tmp_path)
    assert (result.status, result.blame) == ("warn", "job")
    assert "1 processes of job 7 outlived it: 50" in result.text
    assert answer("leftovers", Case({}, root=str(tmp_path), job="9", uid=2001), tmp_path).status == "ok"
    assert answer("leftovers", Case({}, root=str(tmp_path), job="7", uid=0), tmp_path).status == "ok", "never root's"
    assert answer("leftovers", Case({}, root=str(tmp_path)), tmp_path).status == "ok", "no job at all"


def test_a_process_that_hides_in_its_name_or_is_torn_is_no_trouble(tmp_path: Path) -> None:
    process(tmp_path, 50, 2001, "7")
    (tmp_path / "proc" / "50" / "stat").write_text("50 (x")
    (tmp_path / "proc" / "51").mkdir()
    (tmp_path / "proc" / "51" / "stat").write_text("\x00\xff garbage")
    assert answer("leftovers", Case({}, root=str(tmp_path), job="7", uid=2001), tmp_path).status == "ok"


def test_left_over_processes_that_hang_the_reader_do_not_hang_us(tmp_path: Path) -> None:
    machine(tmp_path, {"/proc/50/stat": None, "/proc/50/status": None})
    assert answer("leftovers", Case({}, root=str(tmp_path), job="7", uid=2001), tmp_path).status == "ok"


def test_a_real_process_of_the_job_is_killed_and_a_zombie_is_nobody() -> None:
    host = checks.Host({"fix": True, "least_uid": 0}, time.monotonic() + 100, job=None)
    pid = os.fork()
    if pid == 0:
        os.execve("/bin/sleep", ["sleep", "600"], {"SLURM_JOB_ID": "424242"})
    found = processes.read(host, pid)
    assert found is not None
    deadline = time.monotonic() + 60
    while processes.job_of(host, pid) != "424242" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert leftovers._end(host, "424242", os.getuid(), [found]) == ([], 0)
    assert os.waitpid(pid, 0)[1] == 9


def test_a_job_that_forks_on_is_killed_with_all_that_it_forks(tmp_path: Path) -> None:
    """Each child ends after it has forked the next one: who kills only what it saw first kills nobody."""
    host = checks.Host({"fix": True, "least_uid": 0}, time.monotonic() + 100, job=None)
    script = "n=0; while [ $n -lt 400000 ]; do n=$((n+1)); (sleep 0.05 &); done"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.execve("/bin/sh", ["sh", "-c", script], {"SLURM_JOB_ID": "424243", "PATH": "/usr/bin:/bin"})
    uid, deadline = os.getuid(), time.monotonic() + 10
    seen: list[processes.Process] = []
    while len(seen) < 3 and time.monotonic() < deadline:
        seen = [process for process in processes.of_uid(host, uid) if processes.job_of(host, process.pid) == "424243"]
    assert leftovers._end(host, "424243", uid, seen) == ([], 0)
    assert os.waitpid(pid, 0)[1] == 9


def test_a_check_that_wants_all_memory_is_unknown_and_a_tool_is_not_bounded(tmp_path: Path) -> None:
    def greedy() -> str:
        child.bound_memory()
        return str(len(bytearray(2 << 30)))

    done = child.start(greedy, "greedy").finish(20)
    assert (done.code, "MemoryError" in done.out) == (70, True)

    def asks() -> str:
        child.bound_memory()
        return child.run(("/bin/sh", "-c", "ulimit -v"), 5).out

    assert child.start(asks, "asks").finish(20).out.strip() == "unlimited"


def leave(tmp: Path, uid: int) -> Path:
    shm = tmp / "shm"
    (shm / "deep" / "er").mkdir(parents=True)
    (shm / "deep" / "er" / "file").write_text("x")
    (shm / "psm").write_text("x")
    (shm / "shadow").symlink_to(tmp / "precious")
    (tmp / "precious").write_text("keep me")
    for path in [shm / "deep", shm / "deep" / "er", shm / "deep" / "er" / "file", shm / "psm"]:
        os.chown(path, uid, uid)
    os.lchown(shm / "shadow", uid, uid)
    (shm / "of-root").write_text("x")
    age_files()
    return shm


def test_leftovers_in_shared_memory_go_without_following_anything(tmp_path: Path) -> None:
    """slurm-gcp#223 and its like: a symlink at a predictable name is removed, never followed."""
    shm = leave(tmp_path, 2001)
    options = {"fix": True, "paths": [str(shm)], "squeue": squeue(tmp_path, "7 2001 COMPLETING\n")}
    result = answer("tmpfiles", Case(options, job="7", uid=2001), tmp_path)
    assert (result.status, result.blame) == ("warn", "job"), result.text
    assert [path.name for path in shm.iterdir()] == ["of-root"]
    assert (tmp_path / "precious").read_text() == "keep me"


@pytest.mark.parametrize(
    ("says", "how", "status", "text"),
    [
        ("7 2001 COMPLETING\n8 2001 RUNNING\n", {}, "ok", "another job"),
        ("7 2001 COMPLETING\n8 2001 SUSPENDED\n", {}, "ok", "another job"),  # deepops#1408
        ("7 2001 COMPLETING\n8 2001 STOPPED\n", {}, "ok", "another job"),
        ("7 2001 COMPLETING\n8 2001 CONFIGURING\n", {}, "ok", "another job"),
        ("", {"code": 1}, "unknown", "squeue"),  # slurm#171: no answer is not "no jobs"
        ("slurm_load_jobs error", {}, "unknown", "squeue"),
        ("", {"hangs": True}, "unknown", "squeue"),
        ("x y z\n", {}, "unknown", "squeue"),
    ],
)
def test_files_stay_while_another_job_of_the_user_may_be_there(
    says: str, how: dict[str, Any], status: str, text: str, tmp_path: Path
) -> None:
    shm = leave(tmp_path, 2001)
    options = {"fix": True, "paths": [str(shm)], "squeue": squeue(tmp_path, says, **how)}
    result = answer("tmpfiles", Case(options, job="7", uid=2001, timeout_s=3.0 * limit(how)), tmp_path)
    assert (result.status, text in result.text) == (status, True), result.text
    assert (shm / "psm").exists()


def test_a_folder_of_very_many_files_goes_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_resilience.hooks.checks.tmpfiles.PORTION", 7)
    shm = tmp_path / "shm"
    (shm / "many").mkdir(parents=True)
    for index in range(50):
        (shm / "many" / str(index)).touch()
        os.chown(shm / "many" / str(index), 2001, 2001)
    os.chown(shm / "many", 2001, 2001)
    age_files()
    options = {"fix": True, "paths": [str(shm)], "squeue": squeue(tmp_path, "")}
    assert answer("tmpfiles", Case(options, job="7", uid=2001), tmp_path).text.endswith("removed")
    assert list(shm.iterdir()) == []


def test_users_are_numbers_so_that_ann_is_not_joann(tmp_path: Path) -> None:
    """deepops: a name, or a number, that is a part of another one is another one."""
    shm = leave(tmp_path, 2001)
    options = {"fix": True, "paths": [str(shm)], "squeue": squeue(tmp_path, "8 20011 RUNNING\n9 12001 RUNNING\n")}
    assert answer("tmpfiles", Case(options, job="7", uid=200), tmp_path).status == "ok", "uid 200 is no uid 2001"
    assert (shm / "psm").exists()
    assert answer("tmpfiles", Case(options, job="7", uid=2001), tmp_path).text.endswith("removed"), "those jobs are others'"


def test_a_file_that_even_root_cannot_delete_is_the_jobs_fault(tmp_path: Path) -> None:
    shm = leave(tmp_path, 2001)
    (shm / "deep" / "of-root").write_text("x")  # what is not the user's own stays, and so does the folder
    options = {"fix": True, "paths": [str(shm)], "squeue": squeue(tmp_path, "")}
    result = answer("tmpfiles", Case(options, job="7", uid=2001), tmp_path)
    assert (result.status, result.blame, result.word) == ("warn", "job", "kept")


# --- a site's own ---


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "ok"), (1, "warn"), (2, "fail"), (3, "unknown"), (4, "unknown"), (127, "unknown"), (255, "unknown")],
)
def test_a_sites_check_speaks_by_its_exit_code(code: int, status: str, tmp_path: Path) -> None:
    command = tool(Path(f"/opt/srh-unit-{os.getpid()}") / "check", "one line\nand another", code=code)
    try:
        result = answer("site_x", Case({}, command=str(command)), tmp_path)
    finally:
        command.unlink()
        command.parent.rmdir()
    assert result.status == status, result.text
    assert "and another" not in result.text


def test_a_sites_check_that_others_may_write_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    command = tmp_path / "check"
    command.write_text(f"#!/bin/sh\ntouch {ran}\n")
    command.chmod(0o777)
    result = answer("site_x", Case({}, command=str(command)), tmp_path)
    assert result.status == "unknown"
    assert "written by others" in result.text
    assert not ran.exists()


# --- the engine around them ---


@pytest.mark.parametrize(
    ("pattern", "node", "fits"),
    [
        ("n[1-3]", "n2", True), ("n[1-3]", "n4", False), ("n[01-03]", "n2", False), ("n[01-03]", "n02", True),
        ("gpu*", "gpu-x", True),
        ("n1,n2", "n2", True), ("n1", "n10", False), ("", "n1", False), ("n[a]", "na", False), ("n[1,5-6]x", "n5x", True),
        ("(n1|n2)", "n1", False), ("n.", "n1", False),
    ],
)  # fmt: skip
def test_rules_name_nodes(pattern: str, node: str, fits: bool) -> None:
    assert engine.matches(pattern, node) is fits
