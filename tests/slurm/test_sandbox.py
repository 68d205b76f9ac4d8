"""The sandbox itself, on the running thing: what the other tests take for granted is shown here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_resilience.errors import SandboxError
from slurm_resilience.sandbox import Sandbox, freezer, network, node, processes
from slurm_resilience.sandbox.layout import Layout

LONG_JOB = """#!/bin/bash
#SBATCH --nodes=4 --exclusive --requeue --no-kill --open-mode=append
srun -N4 --no-kill sleep 1000
sleep 1000
"""


def submit(sandbox: Sandbox, shared: Path, script: str, *options: str) -> str:
    path = shared / "job.sh"
    path.write_text(script)
    argv = ["sbatch", "--parsable", f"--output={shared}/out.%j", *options, str(path)]
    return sandbox.exec(argv, cwd=shared, check=True).stdout.strip()


def finished_job(sandbox: Sandbox, shared: Path, script: str, *options: str) -> str:
    """Like sbatch --wait, which looks only every ten seconds."""
    job = submit(sandbox, shared, script, *options)
    sandbox.wait_for(lambda: sandbox.job_state(job) in ("COMPLETED", "FAILED"), 150, what=f"The end of job {job}")
    return job


def running_job(sandbox: Sandbox, shared: Path, *options: str) -> str:
    job = submit(sandbox, shared, LONG_JOB, *options)
    sandbox.wait_for(lambda: sandbox.job_state(job) == "RUNNING", 90, what="The start of the job")
    sandbox.wait_for(lambda: len(sleepers(sandbox)) >= 4, 90, what="Its processes on four nodes")
    return job


def sleepers(sandbox: Sandbox) -> list[tuple[str, int]]:
    """(node, process) of the job's sleeping processes."""
    hosts = [sandbox.host(name) for name in sandbox.nodes]
    inside = [(host.name, pid) for host in hosts if host.alive() for pid in processes.in_namespace_of(host.pid)]
    return [(name, pid) for name, pid in inside if processes.name(pid) == "sleep" and "1000" in processes.command_line(pid)]


@contextmanager
def background(sandbox: Sandbox, argv: list[str], host: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command on a host, dead at the end whatever happened."""
    with subprocess.Popen(sandbox.exec_command(argv, host=host)) as running:
        try:
            yield running
        finally:
            running.kill()


def cli(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurm_resilience", "sandbox", *argv], capture_output=True, text=True, timeout=300
    )


# --- what a cluster is ---


def test_a_job_of_an_ordinary_user_runs_on_four_hosts_that_share_only_files(sandbox: Sandbox, shared: Path) -> None:
    script = """#!/bin/bash
#SBATCH --nodes=4 --gres=gpu:2
srun -N4 bash -c 'echo $(hostname) $(id -un) $(cat /proc/sys/kernel/random/boot_id) $CUDA_VISIBLE_DEVICES \
$(ls /dev/shm | wc -l) $(ip -4 -o addr show eth0 | tr -s " " | cut -d" " -f4) $(ps -e --no-headers | wc -l)
touch /dev/shm/mine'
"""
    job = finished_job(sandbox, shared, script)
    lines = sorted(line.split() for line in (shared / f"out.{job}").read_text().splitlines())
    assert [line[0] for line in lines] == ["n1", "n2", "n3", "n4"]
    assert {line[1] for line in lines} == {"alice"}
    assert len({line[2] for line in lines}) == 4, "each node has a boot id of its own"
    assert {line[3] for line in lines} == {"0,1"}
    assert {line[4] for line in lines} == {"0"}, "each node has a /dev/shm of its own"
    assert [line[5] for line in lines] == [f"10.77.0.{i}/16" for i in (1, 2, 3, 4)]
    assert all(int(line[6]) < 25 for line in lines), "a node sees its own processes only"


def test_accounting_knows_the_job(sandbox: Sandbox, shared: Path) -> None:
    job = finished_job(sandbox, shared, "#!/bin/bash\nexit 3\n")

    def recorded() -> bool:
        shown = sandbox.exec(["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode,User"]).stdout.strip()
        return shown == "FAILED|3:0|alice"

    sandbox.wait_for(recorded, 90, what="The job's record in the database")


def test_nodes_cannot_reach_anything_outside(sandbox: Sandbox) -> None:
    shown = sandbox.exec(["cat", "/proc/net/route"], host="n1").stdout.splitlines()[1:]
    assert [line.split()[1] for line in shown] == ["00004D0A"], "one route, to 10.77.0.0; no default route"


def test_the_init_reaps_orphans(sandbox: Sandbox) -> None:
    sandbox.exec(["bash", "-c", "for i in 1 2 3 4 5; do (sleep 0.05 &) ; done"], host="n2")
    host = sandbox.host("n2")

    def zombies() -> list[int]:
        return [pid for pid in processes.all_pids() if processes.parent(pid) == host.pid and processes.state(pid) == "Z"]

    def asleep() -> list[int]:
        return [pid for pid in processes.in_namespace_of(host.pid) if processes.name(pid) == "sleep"]

    sandbox.wait_for(lambda: not asleep() and not zombies(), 60, what="The reaping of five orphans")


# --- exec ---


def test_exec_is_a_login_of_alice(sandbox: Sandbox) -> None:
    shown = sandbox.exec(["env"], cwd="/root").stdout.splitlines()
    variables = dict(line.split("=", 1) for line in shown)
    assert variables["HOME"] == variables["PWD"] == "/home/alice", "/root cannot be read, so home it is"
    assert variables["USER"] == "alice"
    assert variables["SLURM_CONF"] == str(sandbox.layout.slurm_conf)
    assert variables["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert "PYTEST_CURRENT_TEST" not in variables, "nothing of the caller's environment"
    assert sandbox.exec(["pwd"], cwd="/usr/share").stdout == "/usr/share\n"
    assert sandbox.exec(["id", "-un"], root=True).stdout == "root\n"
    assert sandbox.exec(["hostname"], host="n3").stdout == "n3\n"
    assert sandbox.exec(["cat"], input="text").stdout == "text"


def test_exec_ends_as_the_command_ends(sandbox: Sandbox) -> None:
    assert sandbox.exec(["sh", "-c", "exit 7"]).returncode == 7
    assert sandbox.exec(["sh", "-c", "kill -9 $$"]).returncode == 128 + 9
    assert sandbox.exec(["no-such-command"]).returncode == 127
    piped = sandbox.exec(["bash", "-c", "yes | head -1"])
    assert (piped.stdout, piped.stderr) == ("y\n", ""), "SIGPIPE is not ignored"


def test_exec_in_time_or_not_at_all(sandbox: Sandbox) -> None:
    seconds = str(1_000_000 + os.getpid())  # another session's sleepers are not ours
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        sandbox.exec(["bash", "-c", f"echo said; sleep {seconds} & sleep {seconds}"], timeout=5)
    assert caught.value.output == "said\n"
    left = [pid for pid in processes.all_pids() if processes.command_line(pid) == ["sleep", seconds]]
    assert not left, "the whole session is gone"


def test_a_killed_exec_takes_its_command_along(sandbox: Sandbox) -> None:
    command = ["sleep", str(2_000_000 + os.getpid())]
    with subprocess.Popen(sandbox.exec_command(command)) as outer:
        sleeping = lambda: [pid for pid in processes.all_pids() if processes.command_line(pid) == command]  # noqa: E731
        sandbox.wait_for(sleeping, 60)
        outer.kill()
        outer.wait()
        sandbox.wait_for(lambda: not sleeping(), 60, what="The end of the command")


# --- faults ---


def test_power_off_is_silent_and_kills_everything(sandbox: Sandbox, shared: Path) -> None:
    job = running_job(sandbox, shared)
    listener = "import socket; s = socket.create_server(('', 4242)); c, _ = s.accept(); c.recv(1)"
    with background(sandbox, [sys.executable, "-c", listener], "n3") as server:
        dial = (
            "import socket, sys, time\n"
            "while True:\n"
            "    try:\n        c = socket.create_connection(('n3', 4242)); break\n"
            "    except OSError:\n        time.sleep(0.05)\n"
            "print('connected', flush=True)\n"
            "c.settimeout(float(sys.argv[1]))\n"
            "try:\n    print('FIN', c.recv(1))\nexcept TimeoutError:\n    print('silence')\n"
        )
        command = sandbox.exec_command([sys.executable, "-c", dial, "3"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "connected\n"
            before = sandbox.host("n3")
            happened = sandbox.fault("power-off", "n3")
            assert client.stdout.read() == "silence\n", "no FIN and no RST gave the loss away"
        server.wait()
    assert abs(happened["off_at"] - time.time()) < 200
    assert not before.init.alive()
    assert "n3" not in {name for name, _ in sleepers(sandbox)}
    assert sandbox.job_state(job) == "RUNNING", "Slurm has not noticed, with SlurmdTimeout at 300 s"
    with pytest.raises(SandboxError, match="n3 is off"):
        sandbox.fault("power-off", "n3")


def boot_facts(sandbox: Sandbox, name: str) -> tuple[str, float]:
    shown = sandbox.exec(["cat", "/proc/sys/kernel/random/boot_id", "/proc/uptime"], host=name).stdout.split()
    return shown[0], float(shown[1])


def test_power_on_is_a_new_boot_and_the_node_takes_jobs(sandbox: Sandbox) -> None:
    old_id, _ = boot_facts(sandbox, "n2")
    sandbox.fault("power-off", "n2")
    off = time.time()
    sandbox.fault("power-on", "n2")
    new_id, uptime = boot_facts(sandbox, "n2")
    assert new_id != old_id
    assert uptime <= time.time() - off + 1, "its clocks start at zero"
    shown = sandbox.slurm(["scontrol", "-o", "show", "node", "n2"], env={"SLURM_TIME_FORMAT": "%s"}).stdout
    assert off - 2 <= int(shown.partition("BootTime=")[2].split()[0]) <= time.time() + 1, "Slurm sees the new boot time"
    assert sandbox.exec(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


def test_power_on_with_the_same_boot(sandbox: Sandbox) -> None:
    old_id, old_uptime = boot_facts(sandbox, "n2")
    sandbox.fault("power-off", "n2")
    sandbox.fault("power-on", "n2", same_boot=True)
    new_id, new_uptime = boot_facts(sandbox, "n2")
    assert new_id == old_id
    assert new_uptime >= old_uptime
    with pytest.raises(SandboxError, match="n2 is on already"):
        sandbox.fault("power-on", "n2")


def reaches(sandbox: Sandbox, name: str) -> bool:
    return sandbox.exec(["timeout", "5", "bash", "-c", f"echo > /dev/tcp/{name}/6818"]).returncode == 0


def test_cut_and_heal(sandbox: Sandbox) -> None:
    assert reaches(sandbox, "n4")
    sandbox.fault("cut", "n4")
    assert not reaches(sandbox, "n4")
    assert sandbox.host("n4").init.alive()
    sandbox.fault("heal", "n4")
    sandbox.wait_for(lambda: reaches(sandbox, "n4"), 60)


def test_a_frozen_node_stands_still_and_goes_on(sandbox: Sandbox, shared: Path) -> None:
    counter = shared / "count"
    script = f"i=0; while sleep 0.02; do i=$((i+1)); echo $i > {counter}; done"
    with background(sandbox, ["bash", "-c", script], "n1"):
        count = lambda: int(counter.read_text().strip() or 0) if counter.exists() else 0  # noqa: E731
        sandbox.wait_for(lambda: count() > 3, 60)
        sandbox.fault("freeze", "n1")
        frozen_at = counter.read_text()
        with pytest.raises(SandboxError, match=r"did not come within 0\.5 s"):
            sandbox.wait_for(lambda: counter.read_text() != frozen_at, 0.5)
        sandbox.fault("thaw", "n1")
        sandbox.wait_for(lambda: counter.read_text() != frozen_at, 60)


def test_without_a_freezer_signals_do_and_what_stood_still_before_stays_so(sandbox: Sandbox) -> None:
    host = sandbox.host("n1")
    with background(sandbox, ["sleep", "973"], "n1"), background(sandbox, ["sleep", "974"], "n1"):
        found: dict[str, int] = {}

        def both() -> bool:
            found.update({" ".join(processes.command_line(pid)): pid for pid in processes.in_namespace_of(host.pid)})
            return {"sleep 973", "sleep 974"} <= set(found)

        sandbox.wait_for(both, 60)
        hung, free = found["sleep 973"], found["sleep 974"]
        os.kill(hung, signal.SIGSTOP)
        sandbox.wait_for(lambda: processes.state(hung) == "T", 60)
        before = freezer.freeze(host.pid, None)
        assert {processes.state(pid) for pid in processes.in_namespace_of(host.pid)} - {"Z"} == {"T"}
        freezer.thaw(host.pid, None, before)
        sandbox.wait_for(lambda: processes.state(free) == "S", 60)
        assert processes.state(hung) == "T"


def test_preemption_requeues_the_low_job(sandbox: Sandbox, shared: Path) -> None:
    settings = {"GraceTime": 2, "KillWait": 2, "SchedulerParameters": "bf_interval=1,sched_interval=2"}
    Sandbox.up(nodes=4, name=sandbox.layout.name, settings=settings)
    job = running_job(sandbox, shared)
    happened = sandbox.fault("preempt", nodes=2, seconds=60)
    assert happened["victims"] == [int(job)]
    sandbox.wait_for(lambda: sandbox.job(job).get("Restarts") == "1", 120, what="The requeue")
    sandbox.wait_for(lambda: sandbox.job_state(happened["job"]) == "RUNNING", 120, what="The start of the preempting job")


def test_preempt_says_when_there_is_nothing_to_preempt(sandbox: Sandbox, shared: Path) -> None:
    with pytest.raises(SandboxError, match="nothing to preempt"):
        sandbox.fault("preempt")
    submit(sandbox, shared, "#!/bin/bash\nsleep 1000\n", "--nodes=1")
    sandbox.wait_for(lambda: "ALLOCATED" in sandbox.node_states().values() or "MIXED" in sandbox.node_states().values(), 90)
    with pytest.raises(SandboxError, match="Nothing was preempted"):
        sandbox.fault("preempt", nodes=1)
    queued = sandbox.slurm(["squeue", "-h", "-p", "high", "-t", "PD,R"]).stdout
    assert not queued, "it took its own job back"


def test_slurmctld_dies_and_comes_back_with_its_jobs(sandbox: Sandbox, shared: Path) -> None:
    job = running_job(sandbox, shared)
    # slurmctld saves within seconds; a kill before that would bring the job back as pending, on the real thing too
    sandbox.slurm(["scontrol", "update", f"JobId={job}", "Comment=saved-since"])
    saved = sandbox.layout.controller_state / "job_state"
    sandbox.wait_for(lambda: saved.exists() and b"saved-since" in saved.read_bytes(), 90, what="Slurm's save of its state")
    before = set(sleepers(sandbox))
    sandbox.fault("kill-controller")
    with pytest.raises(SandboxError, match="slurmctld does not run"):
        sandbox.fault("kill-controller")
    sandbox.fault("restart-controller")
    assert sandbox.job_state(job) == "RUNNING"
    assert set(sleepers(sandbox)) == before, "no process of the job was touched"


def test_drain_and_resume(sandbox: Sandbox) -> None:
    sandbox.fault("drain", "n1", "n2", reason="because")
    assert "DRAIN" in sandbox.node_state("n1")
    assert "because" in sandbox.slurm(["scontrol", "-o", "show", "node", "n2"]).stdout
    sandbox.fault("resume", "n[1-2]")
    assert sandbox.node_state("n1") == "IDLE"


def test_a_failing_prolog_holds_the_job(sandbox: Sandbox, shared: Path) -> None:
    sandbox.fault("fail-prolog", "n1")
    job = submit(sandbox, shared, "#!/bin/bash\nhostname\n", "--nodelist=n1")
    sandbox.wait_for(lambda: sandbox.job(job).get("Reason") == "launch_failed_requeued_held", 90)
    assert "DRAIN" in sandbox.node_state("n1")
    sandbox.fault("fail-prolog", "n1", off=True)
    sandbox.fault("resume", "n1")
    sandbox.exec(["scontrol", "release", job], check=True)


def test_a_failing_epilog_drains_the_node(sandbox: Sandbox, shared: Path) -> None:
    sandbox.fault("fail-epilog", "n2")
    job = finished_job(sandbox, shared, "#!/bin/bash\nhostname\n", "--nodelist=n2")
    assert (shared / f"out.{job}").read_text() == "n2\n"
    sandbox.wait_for(lambda: "DRAIN" in sandbox.node_state("n2"), 60)


def test_hooks_of_an_admin_run_around_each_job(sandbox: Sandbox, shared: Path) -> None:
    hook = sandbox.layout.hooks / "prolog.d" / "10-note"
    hook.write_text(f"#!/bin/sh\necho $SLURM_JOB_ID $(id -u) $(hostname) >> {shared}/hook\n")
    hook.chmod(0o755)
    try:
        job = finished_job(sandbox, shared, "#!/bin/bash\nhostname\n", "--nodelist=n3")
    finally:
        hook.unlink()
    assert (shared / "hook").read_text() == f"{job} 0 n3\n"


@pytest.mark.parametrize(
    ("how", "outcome"), [("hang", "TimeoutExpired"), ("fail", "rc 1"), ("missing", "FileNotFoundError")], ids=lambda v: str(v)
)
def test_break_scontrol(sandbox: Sandbox, how: str, outcome: str) -> None:
    attempt = (
        "import subprocess, sys\n"
        "try:\n    done = subprocess.run(['scontrol', 'ping'], timeout=float(sys.argv[1]), capture_output=True)\n"
        "    print('rc', done.returncode)\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
    )

    def tried(host: str, within_s: float = 60.0) -> str:
        return sandbox.exec([sys.executable, "-c", attempt, str(within_s)], host=host).stdout.strip()

    within_s = 1.0 if how == "hang" else 60.0

    sandbox.fault("break-scontrol", how=how)
    assert tried("login", within_s) == tried("n1", within_s) == outcome
    sandbox.fault("power-off", "n1")
    sandbox.fault("power-on", "n1")
    assert tried("n1", within_s) == outcome, "a node that boots meanwhile has it too"
    sandbox.fault("break-scontrol", off=True)
    assert tried("login") == tried("n1") == "rc 0"


def test_a_small_disk_is_one_disk_everywhere_and_can_be_full(sandbox: Sandbox, shared: Path) -> None:
    disk = shared / "disk"
    sandbox.fault("small-disk", str(disk), size="4M")
    sandbox.exec(["sh", "-c", f"echo text > {disk}/file"], host="n1", check=True)
    assert sandbox.exec(["cat", f"{disk}/file"], host="n2").stdout == "text\n"
    happened = sandbox.fault("fill-disk", str(disk))
    assert happened["free_bytes"] == 0
    full = sandbox.exec(["dd", "if=/dev/zero", f"of={disk}/more", "count=1"], host="n3")
    assert "No space left on device" in full.stderr
    sandbox.fault("fill-disk", str(disk), off=True)
    sandbox.exec(["sh", "-c", f"echo more > {disk}/more"], host="n3", check=True)
    sandbox.fault("small-disk", str(disk), off=True)
    assert not list(disk.iterdir())
    with pytest.raises(SandboxError, match="not empty"):
        sandbox.fault("fill-disk", "/etc")


RANKS = """#!/bin/bash
#SBATCH --nodes=4
cat > {shared}/rank.py <<'END'
import mmap, os, sys, time
folder = f"/dev/shm/slurm-resilience-{{os.getuid()}}/run-{{os.uname().nodename}}"
os.makedirs(folder)
page = f"{{folder}}/page-1-{{sys.argv[1]}}"
with open(page, "wb") as file:
    file.write(bytes(4096))
if os.fork() == 0:  # forked as by a warm launcher: nothing in its environment says that it is a rank
    with open(page, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 4096)
    time.sleep(1000)
os.wait()
time.sleep(1000)
END
srun -N4 bash -c '{python} {shared}/rank.py $SLURM_PROCID'
"""


def test_ranks_are_found_by_their_page(sandbox: Sandbox, shared: Path) -> None:
    job = submit(sandbox, shared, RANKS.format(shared=shared, python=sys.executable))
    from slurm_resilience.sandbox.process_faults import ranks

    sandbox.wait_for(lambda: [one.rank for one in ranks(sandbox)] == [0, 1, 2, 3], 90, what="Four ranks")
    victim = next(one for one in ranks(sandbox) if one.rank == 2)
    happened = sandbox.fault("kill-rank", index=2)
    assert (happened["pid"], happened["node"], happened["job"]) == (victim.process.pid, victim.node, job)
    assert not victim.process.alive()
    with pytest.raises(SandboxError, match="no such rank"):
        sandbox.fault("kill-rank", index=2)
    hung = sandbox.fault("hang-rank", node=ranks(sandbox)[0].node)
    assert processes.state(hung["pid"]) == "T"


def test_slurmd_alone(sandbox: Sandbox, shared: Path) -> None:
    running_job(sandbox, shared)
    before = {pid for name, pid in sleepers(sandbox) if name == "n2"}
    sandbox.fault("kill-slurmd", "n2")
    assert {pid for name, pid in sleepers(sandbox) if name == "n2"} == before, "the job's processes live on"
    sandbox.fault("restart-slurmd", "n2")
    assert {pid for name, pid in sleepers(sandbox) if name == "n2"} == before


# --- from nothing to nothing ---


@pytest.fixture
def other(machine_can: None) -> Iterator[str]:
    name = f"other-{os.getpid()}"
    yield name
    Sandbox.remove(name)


def nothing_is_left(name: str) -> bool:
    return not processes.tagged(node.TAG, name) and not network.present(Layout(name))


def test_two_side_by_side_settings_and_no_accounting(sandbox: Sandbox, other: str) -> None:
    settings = {"slurmdtimeout": 7, "low.GraceTime": 0, "AuthInfo.cred_expire": 10}
    second = Sandbox.up(nodes=2, name=other, accounting=False, settings=settings, private_tmp=True)
    assert second.exec(["srun", "-N2", "hostname"]).returncode == 0
    assert sandbox.exec(["srun", "-N4", "hostname"]).returncode == 0
    shown = second.exec(["scontrol", "show", "config"]).stdout
    assert "SlurmdTimeout           = 7 sec" in shown
    assert "cred_expire=10" in shown
    assert "GraceTime=0" in second.exec(["scontrol", "show", "partition", "low"]).stdout
    assert second.exec(["ls", "/tmp"], host="n1").stdout == "", "each node has its own /tmp"
    assert sandbox.exec(["sinfo", "-h", "-o", "%D", "-p", "low"]).stdout.strip() == "4"
    # up again is fine, with other settings it changes them and keeps jobs, with another shape it refuses
    job = second.exec(["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1000"], cwd="/", check=True).stdout.strip()
    second.wait_for(lambda: second.job_state(job) == "RUNNING", 90)
    Sandbox.up(nodes=2, name=other, accounting=False, private_tmp=True, settings={"SlurmdTimeout": 8})
    assert "SlurmdTimeout           = 8 sec" in second.exec(["scontrol", "show", "config"]).stdout
    assert second.job_state(job) == "RUNNING"
    with pytest.raises(SandboxError, match="not a valid number"):
        Sandbox.up(nodes=2, name=other, accounting=False, private_tmp=True, settings={"SlurmdTimeout": "soon"})
    assert "SlurmdTimeout           = 8 sec" in second.exec(["scontrol", "show", "config"]).stdout, "what ran runs on"
    with pytest.raises(SandboxError, match="nodes is 2, not 3"):
        Sandbox.up(nodes=3, name=other, accounting=False, private_tmp=True)
    second.down()
    second.down()
    assert nothing_is_left(other)
    assert sandbox.exec(["srun", "-N4", "hostname"]).returncode == 0


def test_up_and_down_after_a_crash(other: str) -> None:
    first = Sandbox.up(nodes=2, name=other)
    for host in first.state().hosts.values():
        host.init.send(signal.SIGKILL)
    with pytest.raises(SandboxError, match="was killed"):
        first.wait_for(lambda: not first.exec(["true"]), 60)
    again = Sandbox.up(nodes=2, name=other)
    assert again.exec(["srun", "-N2", "hostname"]).returncode == 0
    again.host("n1").init.send(signal.SIGKILL)  # half of it
    assert Sandbox.remove(other)
    assert nothing_is_left(other)
    assert not Sandbox.remove(other)


def test_an_interrupted_up_leaves_nothing_that_the_next_one_minds(other: str) -> None:
    command = [sys.executable, "-m", "slurm_resilience", "sandbox", "up", "--nodes", "2", "--name", other]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as starting:
        deadline = time.monotonic() + 90
        while not processes.tagged(node.TAG, other):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        starting.kill()
    assert processes.tagged(node.TAG, other), "it was killed half-way"
    assert Sandbox.up(nodes=2, name=other).exec(["srun", "-N2", "hostname"]).returncode == 0


# --- the command line ---


def test_the_command_line(sandbox: Sandbox) -> None:
    name = ["--name", sandbox.layout.name]
    status = json.loads(cli("status", "--json", *name).stdout)
    assert status["up"] is True
    assert [node["slurm"] for node in status["nodes"]] == ["IDLE"] * 4
    assert Path(status["logs"]["slurmctld"]).exists()
    assert sandbox.layout.name in cli("list").stdout.split()
    nowhere = cli("status", "--json", "--name", "test-nowhere")
    assert nowhere.returncode == 1
    assert json.loads(nowhere.stdout)["up"] is False
    assert cli("status", "--name", "test-nowhere").returncode == 78
    assert cli("exec", *name, "--", "sh", "-c", "exit 5").returncode == 5
    happened = json.loads(cli("fault", "drain", "n1", "--json", *name).stdout)
    assert happened["nodes"] == ["n1"]
    assert abs(happened["at"] - time.time()) < 200
    assert "n9" in cli("fault", "drain", "n9", *name).stderr
    line = cli("fault", "resume", "n1", *name).stdout
    assert line.count("\n") == 1
    assert "resume n1" in line


def test_an_interpreter_that_alice_cannot_run_is_warned_of(
    sandbox: Sandbox, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sandbox.warnings() == []
    hidden = shared / "hidden"
    hidden.mkdir(mode=0o700)  # root's, as an environment below /root is
    (hidden / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(hidden / "python"))
    assert "alice cannot run" in sandbox.warnings()[0]


def test_an_ordinary_user_is_told_that_root_is_needed(machine_can: None) -> None:
    account = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*account, sys.executable, "-m", "slurm_resilience", "sandbox", "status"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HOME": "/"}, cwd="/")
    assert result.returncode != 0
    assert "needs root" in result.stderr
    assert "Traceback" not in result.stderr
