"""Recorded and made-up answers for the checks of devices, services, stuck kernels; the cited ones are from public reports."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_resilience.hooks.admin.conformance import Case, kernel_log, machine, tool, tool_by_argument

Make = Callable[[Path], Case]

# https://github.com/bottlerocket-os/bottlerocket/pull/4418
H100 = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-4039dfe4-0c97-4b1e-683e-eb7d42699053)\n" + "".join(
    f"\t Link {link}: 26.562 GB/s\n" for link in range(18)
)
# https://github.com/Azure/azhpc-diagnostics/issues/73
V100 = "GPU 3: Tesla V100-SXM2-32GB (UUID: ...)\n" + "".join(
    f"         Link {link}: {'<inactive>' if link in (3, 5) else '25.781 GB/s'}\n" for link in range(6)
)
# https://github.com/Azure/azurehpc-health-checks/issues/162: six links of a PCIe card are never up, by design
H100_PCIE = "GPU 0: NVIDIA H100 NVL (UUID: GPU-1)\n" + "".join(
    f"\t Link {link}: {'<inactive>' if link in (4, 5, 10, 11, 16, 17) else '26.562 GB/s'}\n" for link in range(18)
)
# NVIDIA DCGM user guide, background health checks
DCGM = """Health Monitor Report
+----------------------------------------------------------------------------+
| Group 1          | Overall Health: {0:<40}|
+==================+=========================================================+
| GPU ID: 0        | {0:<56}|
|                  | PCIe system: {0} - Detected more than 8 PCIe         |
|                  | replays per minute for GPU 0: 13                        |
+------------------+---------------------------------------------------------+
"""
DCGM_WELL = """+---------------------------+-------------------------------------------------+
| Health Monitor Report                                                       |
+===========================+=================================================+
| Overall Health            | Healthy                                         |
+---------------------------+-------------------------------------------------+
"""


def limit(how: dict[str, Any]) -> float:
    """A check's time: short where its tool hangs, generous where it only has to be started on a busy machine."""
    return 1.0 if how.get("hangs") else 20.0


def smi(says: str = "", options: dict[str, Any] | None = None, **how: Any) -> Make:
    def make(tmp: Path) -> Case:
        return Case({**(options or {}), "nvidia_smi": str(tool(tmp / "nvidia-smi", says, **how))}, timeout_s=limit(how))

    return make


def nvlink(says: str = "", links: int = 18, **how: Any) -> Make:
    return smi(says, {"links": links}, **how)


def pcie(says: str = "", **how: Any) -> Make:
    return smi(says, {"width": 16}, **how)


def systemctl(says: str = "", **how: Any) -> Make:
    names = ["munge", "sssd.service"]
    return lambda tmp: Case({"names": names, "systemctl": str(tool(tmp / "systemctl", says, **how))}, timeout_s=limit(how))


def dcgmi(says: str = "", **how: Any) -> Make:
    return lambda tmp: Case({"dcgmi": str(tool(tmp / "dcgmi", says, **how))}, timeout_s=limit(how))


def kmsg(*lines: str) -> Make:
    return lambda tmp: Case({}, root=str(machine(tmp / "machine", {"/dev/kmsg": kernel_log(lines)})))


def port_files(device: str = "mlx5_0", /, **texts: str | None) -> dict[str, str | None]:
    base = f"/sys/class/infiniband/{device}/ports/1"
    values: dict[str, str | None] = {
        "state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "400 Gb/sec (4X NDR)\n", "link_downed": "0\n", **texts,
    }  # fmt: skip
    return {f"{base}/{'counters/' if name == 'link_downed' else ''}{name}": text for name, text in values.items()}


def port(ports: tuple[str, ...] = ("mlx5_0:1",), /, **texts: str | None) -> Make:
    def make(tmp: Path) -> Case:
        return Case({"ports": list(ports), "rate_gbps": 400}, root=str(machine(tmp / "machine", port_files("mlx5_0", **texts))))

    return make


def uncabled(tmp: Path) -> Case:
    """https://github.com/leptonai/gpud/pull/99: mlx5_8 is down and disabled, and nobody needs it."""
    down = port_files("mlx5_8", state="1: DOWN\n", phys_state="3: Disabled\n")
    return Case({"ports": ["mlx5_0:1"]}, root=str(machine(tmp / "machine", {**port_files(), **down})))


def process_files(pid: int, uid: int, job: str = "", state: str = "S") -> dict[str, str | None]:
    rest = " ".join([state, "1", *["0"] * 17, str(pid * 10), "0"])
    group = f"/system.slice/slurmstepd.scope/job_{job}/step_0" if job else "/user.slice"
    return {
        f"/proc/{pid}/stat": f"{pid} (python) {rest}\n", f"/proc/{pid}/status": f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n",
        f"/proc/{pid}/cgroup": f"0::{group}\n", f"/proc/{pid}/environ": "A=1\0",
    }  # fmt: skip


def holders(says: str = "", files: dict[str, str | None] | None = None, ended: str = "9", **how: Any) -> Make:
    def make(tmp: Path) -> Case:
        smi = tool_by_argument(tmp / "nvidia-smi", {"query-compute-apps": (says, 0)})
        if how:
            smi = tool(tmp / "nvidia-smi", says, **how)
        root = machine(tmp / "machine", {**(files or {}), "/proc/self/stat": ""})
        return Case({"count": 8, "nvidia_smi": str(smi)}, root=str(root), job=ended, uid=2001, timeout_s=limit(how))

    return make


def stuck_proc(tmp: Path) -> Case:
    case = holders("50\n")(tmp)
    os.mkdir(f"{case.root}/proc/50")
    machine(Path(case.root), {"/proc/50/stat": None})
    return case


SOFT = "watchdog: BUG: soft lockup - CPU#{} stuck for 22s! [node:297680]"
DEVICES: list[tuple[str, str, Make, str, str]] = [
    # check, what, input, status, part of the text
    ("nvlink", "ok (bottlerocket#4418)", nvlink(H100.format(0) + H100.format(1)), "ok", "2 GPUs"),
    ("nvlink", "two are down (azhpc-diagnostics#73)", nvlink(V100, 6), "fail", "GPU 3 has 4 of 6"),
    ("nvlink", "a card that has only twelve (azurehpc-health-checks#162)", nvlink(H100_PCIE, 12), "ok", ""),
    ("nvlink", "none is up", nvlink(
        "GPU 0: H100 (UUID: GPU-1)\n\t Unable to retrieve NVLink information as all links are inActive\n"), "fail", "0 of 18"),
    ("nvlink", "not installed", lambda tmp: Case({"links": 6, "nvidia_smi": str(tmp / "none")}), "unknown", "cannot run"),
    ("nvlink", "fails", nvlink("", code=9), "unknown", ""),
    ("nvlink", "hangs", nvlink(hangs=True), "unknown", "no answer"),
    ("nvlink", "garbage", nvlink("Link 0: 26 GB/s\nGPU\n"), "unknown", "form"),
    ("nvlink", "a state nobody knows", nvlink(V100.replace("<inactive>", "<sleeping>"), 6), "unknown", "sleeping"),
    ("nvlink", "nobody asks", smi("nonsense"), "ok", "no NVLink"),
    ("pcie", "ok", pcie("0, 16\n1, 16\n"), "ok", "2 GPUs"),
    ("pcie", "down-trained to x8 (NVSentinel#890)", pcie("0, 16\n1, 8\n"), "fail", "GPU 1 is connected by 8 of 16"),
    ("pcie", "fails", pcie("", code=9), "unknown", ""),
    ("pcie", "hangs", pcie(hangs=True), "unknown", "no answer"),
    ("pcie", "garbage", pcie("0, wide\n"), "unknown", "form"),
    ("pcie", "nothing", pcie(""), "unknown", "nothing"),
    ("infiniband", "ok", port(), "ok", "1 ports"),
    ("infiniband", "down", port(state="1: DOWN\n", phys_state="2: Polling\n"), "fail", "Polling"),
    ("infiniband", "waits for a subnet manager", port(state="2: INIT\n"), "fail", "INIT"),
    ("infiniband", "slower than it should be", port(rate="200 Gb/sec (4X HDR)\n"), "fail", "200 of 400"),
    ("infiniband", "not there", port(("mlx5_0:1", "mlx5_1:1")), "fail", "mlx5_1 is not there"),
    ("infiniband", "one that nobody has cabled (gpud#99)", uncabled, "ok", ""),
    ("infiniband", "nothing there", lambda tmp: Case({"ports": ["mlx5_0:1"]}, root=str(tmp)), "fail", "no InfiniBand device"),
    ("infiniband", "hangs", port(state=None), "unknown", ""),
    ("infiniband", "garbage", port(state="4: SPLENDID\n"), "unknown", "SPLENDID"),
    ("infiniband", "a rate in another form", port(rate="fast\n"), "unknown", "fast"),
    ("services", "ok", systemctl("active\nactive\n"), "ok", "2 services"),
    ("services", "one is dead", systemctl("active\nfailed\n", code=3), "fail", "sssd.service is failed"),
    ("services", "one is starting", systemctl("activating\nactive\n", code=3), "warn", "munge is activating"),
    ("services", "systemd does not answer (systemd#16670)",
     systemctl("Failed to retrieve unit state: Connection timed out\n", code=1), "unknown", "timed out"),
    ("services", "hangs", systemctl(hangs=True), "unknown", "no answer"),
    ("services", "garbage", systemctl("active\nsplendid\n"), "unknown", "splendid"),
    ("services", "too few words", systemctl("active\n"), "unknown", ""),
    ("lockups", "ok", kmsg("all is well"), "ok", ""),
    ("lockups", "hard and soft (ironfish#701)",
     kmsg(SOFT.format(1), "NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", SOFT.format(23)), "fail", "CPU 3"),
    ("lockups", "soft ones come and go (openzfs#4536)",
     kmsg("NMI watchdog: BUG: soft lockup - CPU#2 stuck for 22s! [SimpleCacheWork:8140]"), "warn", "CPU 2"),
    ("lockups", "a hung task (system76-power#179)", kmsg("INFO: task GpuWatchdog:2837 blocked for more than 120 seconds."),
     "warn", "2837"),
    ("lockups", "an RCU stall", kmsg("rcu: INFO: rcu_sched self-detected stall on CPU"), "warn", "RCU"),
    ("lockups", "a file of a user's with that name", kmsg(
        "a[7]: segfault at 0 ip 0 sp 0 error 4 in watchdog: Watchdog detected hard LOCKUP on cpu 3[400000+1000]"), "ok", ""),
    ("lockups", "no log", lambda tmp: Case({}, root=str(tmp)), "unknown", ""),
    ("lockups", "hangs", lambda tmp: Case({}, root=str(machine(tmp / "m", {"/dev/kmsg": None}))), "unknown", ""),
    ("lockups", "garbage", lambda tmp: Case({}, root=str(machine(tmp / "m", {"/dev/kmsg": "no record\n;;\n"}))), "ok", ""),
    ("dcgm", "ok", dcgmi(DCGM_WELL), "ok", "Healthy"),
    ("dcgm", "ok in the older form", dcgmi(DCGM.format("Healthy")), "ok", "Healthy"),
    ("dcgm", "a warning (DCGM user guide)", dcgmi(DCGM.format("Warning")), "warn", "PCIe"),
    ("dcgm", "a failure", dcgmi(DCGM.format("Failure"), code=1), "fail", "PCIe system: Failure"),
    ("dcgm", "no host engine", dcgmi("Error: unable to establish a connection to the specified host: localhost\n", code=1),
     "unknown", "unable"),
    ("dcgm", "hangs (cluster-toolkit#6230)", dcgmi(hangs=True), "unknown", "no answer"),
    ("dcgm", "garbage (autopilot#68)", dcgmi('{"body": {"Overall Health": {"value": "Healthy-ish"}}}'), "unknown", "form"),
    ("dcgm", "two answers in one", dcgmi(DCGM_WELL + DCGM.format("Failure")), "unknown", "form"),
    ("gpu_strangers", "ok", holders("50\n51\n", {**process_files(50, 2001, "7"), **process_files(51, 0)}), "ok", "2 processes"),
    ("gpu_strangers", "nobody", holders(""), "ok", "0 processes"),
    ("gpu_strangers", "of no job", holders("50\n", process_files(50, 2001)), "fail", "belongs to no job"),
    ("gpu_strangers", "of the ended job (deepops#1315)", holders("50\n", process_files(50, 2001, "9")), "fail", "of job 9"),
    ("gpu_strangers", "of a process that is gone (VisEdit#5)", holders("50\n"), "fail", "is gone"),
    ("gpu_strangers", "of a dead one (mxnet#4242)", holders("50\n", process_files(50, 2001, "9", "Z")), "fail", "is gone"),
    ("gpu_strangers", "a driver without an answer", holders("[Not Supported]\n"), "unknown", "form"),
    ("gpu_strangers", "hangs", holders(hangs=True), "unknown", "no answer"),
    ("gpu_strangers", "a process that cannot be read", stuck_proc, "unknown", ""),
    ("gpu_strangers", "garbage", holders("50, python\n"), "unknown", "form"),
]  # fmt: skip
