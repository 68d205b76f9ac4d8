"""The admin's hooks under a real slurmd and slurmctld: what they drain, what they leave alone, and what comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import SandboxError
from slurm_resilience.hooks import ledger, nodes
from slurm_resilience.hooks.admin import configuration, install
from slurm_resilience.hooks.admin.entries import KINDS, Places
from slurm_resilience.runtime.hint_writer import PLACE
from slurm_resilience.sandbox import Sandbox
from tests.slurm.conftest import _own_name

ADMIN = "ADMIN: do not touch"
CONFIG = """
mode: drain
slurm: {{accounting: true, conf: {conf}, scontrol: {scontrol}, call_s: {call_s}}}
checks:
  site_flag: {{command: {root}/bin/check, contexts: [{contexts}], timeout_s: 5}}
  leftovers: {{options: {{fix: true, least_uid: 500}}}}
  tmpfiles: {{options: {{fix: true, least_uid: 500, paths: [/dev/shm, {root}/scratch]}}}}
  filesystem: {{options: {{paths: [/]}}}}
budget: {{max_nodes: 1, max_percent: 50, partition_max_percent: 50, correlated_nodes: {correlated}, jitter_s: 0.1}}
hints: {{box: {root}/hints}}
return: {{passes: 2, hold_s: 1, per_day: 100}}
"""


class Site:
    """A sandbox with our hooks installed as an admin would, and a check that fails where a test says so."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = Places(root / "prefix", root / "hooks.yaml", root / "state", install.python_of(None))
        (root / "bin").mkdir()
        (root / "flags").mkdir()
        (root / "shared").mkdir()
        (root / "shared").chmod(0o1777)
        (root / "scratch").mkdir()  # cleaned behind every job
        (root / "scratch").chmod(0o1777)
        check = root / "bin" / "check"
        check.write_text(
            "#!/bin/sh\n"
            f'how=$(cat "{root}/flags/$SR_NODE" 2>/dev/null) || exit 0\n'
            '[ "$how" = slow ] && sleep 3 && exit 2\n'
            '[ "$how" = hang ] && exec sleep 3600\n'
            'echo "the flag of $SR_NODE is up"; exit 2\n'
        )
        check.chmod(0o755)
        self.conf = ""
        self.foreign = False
        self.sandbox: Sandbox

    def settings(self, **more: object) -> dict[str, object]:
        values: dict[str, object] = {key: self.places.entry(kind) for key, kind in KINDS.items()}
        return {**values, "HealthCheckInterval": 0, "PrologEpilogTimeout": 60, "RebootProgram": "/bin/true", **more}

    def configure(
        self,
        *,
        contexts: str = "epilog, periodic, boot",
        scontrol: str = "/usr/bin/scontrol",
        correlated: int = 4,
        call_s: int = 6,  # a controller that is slow is none that is dead
    ) -> None:
        self.foreign |= scontrol != "/usr/bin/scontrol"  # some of these drain in an admin's name
        text = CONFIG.format(
            conf=self.conf, root=self.root, contexts=contexts, scontrol=scontrol, correlated=correlated, call_s=call_s
        )
        self.places.config.write_text(text)
        self.places.config.chmod(0o644)
        if self.places.compiled.exists():
            configuration.compile_file(self.places.config, self.places.compiled)

    def flag(self, *names: str, how: str = "fail") -> None:
        for name in names:
            (self.root / "flags" / name).write_text(how)

    def unflag(self) -> None:
        for path in (self.root / "flags").iterdir():
            path.unlink()

    def clear(self) -> None:
        """No memory of earlier tests, on no node."""
        self.unflag()
        for path in self.places.state.iterdir():
            shutil.rmtree(path)
        for name in self.sandbox.nodes:
            self.scontrol("update", f"NodeName={name}", "Comment=")
        self.sandbox.wait_for(lambda: not any(self.node(name).out for name in self.sandbox.nodes), 150, what="four nodes")
        self.cleared_at = time.time()
        if self.foreign:  # a drain of somebody's that has just ended would be taken for one that our next write has wiped
            self.foreign = False
            self.sandbox.wait_for(lambda: time.time() - self.cleared_at > 4, 20, what="an admin's drain to be history")

    def scontrol(self, *words: str) -> str:
        self.foreign |= any(word.startswith("Reason=") for word in words)
        return self.sandbox.slurm(["scontrol", *words]).stdout

    def node(self, name: str) -> nodes.Node:
        return nodes.parse(self.scontrol("-o", "show", "node", name))[0]

    def drained(self) -> list[str]:
        return [name for name in self.sandbox.nodes if self.node(name).drained]

    def run(self, kind: str, name: str, **env: str) -> float:
        """Run a hook by hand as slurmd would on that node; its seconds."""
        started = time.monotonic()
        entry = str(self.places.entry(kind))
        done = self.sandbox.exec(["env", "-i", f"SLURMD_NODENAME={name}", *[f"{k}={v}" for k, v in env.items()], entry],
                                 root=True, host=name, cwd="/")  # fmt: skip
        assert done.returncode == 0, done.stderr
        return time.monotonic() - started

    def look(self, name: str) -> None:
        self.run("healthcheck", name)

    def looked(self, name: str) -> nodes.Node:
        """The node after one more look."""
        self.look(name)
        return self.node(name)

    def comes_back(self, name: str, within: float = 150) -> None:
        try:
            self.sandbox.wait_for(lambda: not self.looked(name).drained, within, what=f"the return of {name}")
        except SandboxError as error:
            told = json.dumps(self.records(name)[-30:], indent=1)
            raise AssertionError(f"{error}\n{self.node(name)}\nwhat its hooks recorded: {told}") from error

    def records(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        found = ledger.entries(str(self.places.state / name / ledger.NAME))
        return [entry for entry in found if not kinds or entry["what"] in kinds]

    def submit(self, script: str, *options: str) -> str:
        path = self.root / "shared" / "job.sh"
        path.write_text("#!/bin/bash\n" + textwrap.dedent(script))
        path.chmod(0o755)
        argv = ["sbatch", "--parsable", f"--output={self.root}/shared/out.%j", *options, str(path)]
        return self.sandbox.exec(argv, cwd=str(self.root / "shared"), check=True).stdout.strip()

    def wait(self, job: str, state: str, within: float = 150) -> None:
        try:
            self.sandbox.wait_for(lambda: self.sandbox.job_state(job) == state, within, what=f"job {job} {state}")
        except SandboxError as error:
            out = self.root / "shared" / f"out.{job}"
            said = out.read_text(errors="replace")[-3000:] if out.exists() else "nothing"
            raise AssertionError(f"{error}\nit is {self.sandbox.job_state(job)}, and said: {said}") from error

    def no_job_left(self) -> None:
        """Every epilog has ended: no node completes any more."""
        self.sandbox.wait_for(
            lambda: not self.sandbox.slurm(["squeue", "-h", "-t", "all", "-o", "%T"]).stdout.count("COMPLETING"),
            150,
            what="epilogs",
        )

    def say(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Our own command line, as root on the control host."""
        paths = ["--config", str(self.places.config), "--state", str(self.places.state)]
        line = [sys.executable, "-m", "slurm_resilience", *argv, *paths]
        return self.sandbox.exec(line, root=True, host="ctl", cwd="/")


@pytest.fixture(scope="module")
def installed(machine_can: None) -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="srh-slurm-", dir="/opt"))
    root.chmod(0o755)
    made = Site(root)
    with _own_name() as name:
        made.sandbox = Sandbox.up(nodes=4, name=name)
        made.conf = str(made.sandbox.layout.slurm_conf)
        made.configure()
        install.apply(install.plan(made.places))
        made.sandbox = Sandbox.up(nodes=4, name=name, settings=made.settings())
        yield made
        made.sandbox.down()
    install.uninstall(made.places, purge=True)
    shutil.rmtree(root)


@pytest.fixture
def site(installed: Site) -> Iterator[Site]:
    installed.sandbox.heal()
    installed.configure()
    installed.clear()
    yield installed
    if installed.sandbox.state().cluster.settings != {k: str(v) for k, v in sorted(installed.settings().items())}:
        installed.sandbox = Sandbox.up(nodes=4, name=installed.sandbox.layout.name, settings=installed.settings())


# --- 1: drained, resumed elsewhere, healed, back ---


def test_a_failing_epilog_drains_the_job_goes_on_elsewhere_and_the_healed_node_comes_back(site: Site) -> None:
    site.sandbox = Sandbox.up(nodes=4, name=site.sandbox.layout.name, settings=site.settings(HealthCheckInterval=3))
    site.configure(contexts="epilog")
    job = site.submit(
        f"""
        echo "$(hostname) $(date +%s.%N)" >> {site.root}/shared/hosts
        [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] && sleep 300
        exit 0
        """,
        "--requeue", "--open-mode=append", "--comment=resilient", "-w", "n1",
    )  # fmt: skip
    seen = site.root / "shared" / "hosts"
    site.sandbox.wait_for(lambda: seen.exists() and seen.read_text().endswith("\n"), 150, what="its first run")
    site.flag("n1")
    started = time.time()
    site.sandbox.exec(["scontrol", "requeue", job], check=True)
    site.sandbox.exec(["scontrol", "update", f"JobId={job}", "ReqNodeList="])
    site.sandbox.wait_for(lambda: site.node("n1").ours is not None, 90, what="our drain of n1")
    drained = site.node("n1")
    assert drained.reason.startswith(f"sr:site_flag j{job}")
    assert drained.user == "root"
    site.wait(job, "COMPLETED", within=150)
    hosts = seen.read_text().split()
    assert hosts[0] == "n1"
    assert hosts[2] != "n1"
    print(f"requeue to running elsewhere: {float(hosts[3]) - started:.1f} s")
    assert float(hosts[3]) - started < 100, "Slurm alone takes 121 s"
    assert "drained" in site.say("nodes", "why", "n1").stdout
    site.unflag()
    site.sandbox.wait_for(lambda: not site.node("n1").out, 150, what="n1 back in service")
    assert site.node("n1").reason == ""
    assert [note.kind for note in site.node("n1").notes] == ["back"]
    assert site.records("n1", "returned")


# --- 2: no more than the budget; no user's job drains or runs anything ---


def test_a_check_that_fails_everywhere_at_once_drains_at_most_the_budget(site: Site) -> None:
    """NVSentinel#1228, #1686: here one node of four may go."""
    site.configure(correlated=100)
    site.flag(*site.sandbox.nodes)
    job = site.submit("srun true\n", "-N4")
    site.wait(job, "COMPLETED")
    site.no_job_left()
    assert len(site.drained()) == 1
    assert sum(len(site.records(name, "drained")) for name in site.sandbox.nodes) == 1
    told = [entry["decision"] for name in site.sandbox.nodes for entry in site.records(name, "not_drained")]
    assert len(told) == 3
    assert set(told) <= {"spent", "correlated"}
    for name in site.sandbox.nodes:
        site.look(name)
    assert len(site.drained()) == 1, "nor does the next look"
    assert "0 left" in site.say("nodes", "budget").stdout
    site.unflag()
    out = site.drained()[0]
    for _ in range(3):
        site.look(out)
    assert site.drained() == [], "return works while the budget is spent"


def test_the_same_check_on_three_of_four_nodes_suspects_the_check(site: Site) -> None:
    site.configure(correlated=3)
    site.flag("n1", "n2", "n3")
    job = site.submit("srun true\n", "-N4")
    site.wait(job, "COMPLETED")
    site.no_job_left()
    assert len(site.drained()) <= 1
    told = {entry["decision"] for name in site.sandbox.nodes for entry in site.records(name, "not_drained")}
    assert "correlated" in told
    assert all(any(note.kind == "flag" for note in site.node(name).notes) for name in ("n1", "n2", "n3")), (
        "flagged all the same"
    )


def test_a_prolog_that_fails_on_every_node_stops_at_the_budget_and_jobs_run(site: Site) -> None:
    """hpcfund#69: with nohold_on_prolog_fail one job drained node after node."""
    site.sandbox = Sandbox.up(
        nodes=4, name=site.sandbox.layout.name, settings=site.settings(SchedulerParameters="nohold_on_prolog_fail")
    )
    site.configure(contexts="prolog")
    site.flag(*site.sandbox.nodes)
    jobs = [site.submit("exit 0\n", "--comment=resilient") for _ in range(6)]
    for job in jobs:
        site.wait(job, "COMPLETED", within=150)
    assert len(site.drained()) == 1
    assert site.records(site.drained()[0], "job_sent_elsewhere")


def test_a_hostile_job_drains_nothing_and_runs_nothing_as_root(site: Site) -> None:
    scratch = site.root / "scratch"
    proof = Path("/tmp/srh-pwned")
    proof.unlink(missing_ok=True)
    comment = "skip_checks\nLD_PRELOAD=/tmp/evil.so\nSLURM_JOB_UID=0\n$(touch /tmp/srh-pwned)"
    job = site.submit(
        f"""
        setsid nohup sleep 777 >/dev/null 2>&1 &
        (exec -a "'; touch /tmp/srh-pwned; '" setsid nohup sleep 778 >/dev/null 2>&1 &)
        head -c 20000000 /dev/zero > /dev/shm/big
        ln -s /etc/shadow /dev/shm/sem.srh
        ln -s /etc/shadow /dev/shm/verdict.json
        mkdir -p {scratch}/deep/er && touch {scratch}/deep/er/immutable
        sleep 1; exit 3
        """,
        "-w", "n2", f"--comment={comment}", "--job-name=hc_x", "--error=/tmp/$(reboot)",
        "--export=ALL,LD_PRELOAD_X=/tmp/evil.so,PYTHONPATH=/tmp,IFS=/",
    )  # fmt: skip
    site.wait(job, "RUNNING")
    immutable = scratch / "deep" / "er" / "immutable"
    site.sandbox.wait_for(immutable.exists, 90)
    stuck = subprocess.run(["chattr", "+i", str(immutable)], check=False).returncode == 0
    try:
        site.wait(job, "FAILED")
        site.no_job_left()
    finally:
        subprocess.run(["chattr", "-i", str(immutable)], check=False)
    assert site.drained() == []
    assert not proof.exists()
    left = site.sandbox.exec(["pgrep", "-f", "sleep 77"], host="n2").stdout
    assert left == "", "its processes are gone"
    assert os.path.exists("/etc/shadow")
    names = site.sandbox.exec(["ls", "/dev/shm"], host="n2").stdout.split()
    assert names == []
    told = {entry["check"]: entry for entry in site.records("n2", "check")}
    assert (told["leftovers"]["status"], told["leftovers"]["blame"]) == ("warn", "job")
    assert (told["tmpfiles"]["status"], told["tmpfiles"]["blame"]) == ("warn", "job")
    assert not stuck or "cannot be removed" in told["tmpfiles"]["text"]
    assert site.records("n2", "own_error") == []
    text = (site.places.state / "n2" / ledger.NAME).read_text()
    assert all(json.loads(line) for line in text.splitlines()), "no forged line"
    assert "pwned" not in text


def test_two_jobs_of_one_user_and_one_ends(site: Site) -> None:
    """deepops#992, #1407."""
    stays = site.submit("touch /dev/shm/precious; sleep 300\n", "-w", "n2")
    site.wait(stays, "RUNNING")
    ends = site.submit("touch /dev/shm/trash; exit 0\n", "-w", "n2")
    site.wait(ends, "COMPLETED")
    site.no_job_left()
    assert "precious" in site.sandbox.exec(["ls", "/dev/shm"], host="n2").stdout
    assert site.sandbox.job_state(stays) == "RUNNING"
    site.sandbox.exec(["scancel", stays], check=True)
    site.wait(stays, "CANCELLED")
    site.no_job_left()
    assert site.sandbox.exec(["ls", "/dev/shm"], host="n2").stdout == ""


# --- 3: what is broken around us ---


def test_a_dead_controller_delays_no_epilog_beyond_its_deadline_and_the_verdict_is_acted_on_later(site: Site) -> None:
    """nhc#161."""
    site.configure(call_s=2)
    site.flag("n1")
    site.sandbox.fault("kill-controller")
    took = site.run("epilog", "n1", SLURM_JOB_ID="4711", SLURM_JOB_UID="65001")
    assert took < 40, "slurmd takes an epilog for failed after PrologEpilogTimeout, 60 s"
    assert [entry["decision"] for entry in site.records("n1", "not_drained")] == ["pending"]
    site.sandbox.fault("restart-controller")
    assert site.drained() == []
    # slurmctld asks its nodes first whether they are there; those that have not answered yet count as out
    site.sandbox.wait_for(lambda: site.looked("n1") and site.drained() == ["n1"], 150, what="the drain")


def test_a_hanging_scontrol_is_bounded(site: Site) -> None:
    site.configure(call_s=2)
    site.flag("n1")
    site.sandbox.fault("break-scontrol", how="hang")
    assert site.run("epilog", "n1", SLURM_JOB_ID="4711", SLURM_JOB_UID="65001") < 40
    assert [entry["decision"] for entry in site.records("n1", "not_drained")] == ["pending"]


def test_scontrol_that_is_not_where_the_configuration_says_is_said_aloud(site: Site) -> None:
    """nhc#147, deepops#919: there is no PATH to search."""
    site.configure(scontrol="/nonexistent/scontrol")
    site.flag("n1")
    site.run("epilog", "n1", SLURM_JOB_ID="4711", SLURM_JOB_UID="65001")
    assert "cannot run /nonexistent/scontrol" in site.records("n1", "not_drained")[0]["why"]
    assert any("/nonexistent/scontrol" in line for line in site.say("hooks", "check").stdout.splitlines())


def test_a_check_that_sometimes_sleeps_past_its_limit_flaps_nothing(site: Site) -> None:
    """nhc#95, cluster-toolkit#6230."""
    site.flag("n1", how="hang")
    job = site.submit("exit 0\n", "-w", "n1")
    site.wait(job, "COMPLETED")
    site.no_job_left()
    site.look("n1")
    assert site.drained() == []
    assert site.records("n1", "check")[0]["status"] == "unknown"


def test_slurmd_killed_in_the_middle_of_an_epilog_loses_no_verdict(site: Site) -> None:
    site.flag("n1", how="slow")
    job = site.submit("exit 0\n", "-w", "n1")
    mark = site.places.state / "n1" / "epilogs" / f"{job}.json"
    site.sandbox.wait_for(mark.exists, 90, what="the epilog")
    site.sandbox.fault("kill-slurmd", "n1")
    site.sandbox.exec(["pkill", "-9", "-f", "slurm_resilience_node/start.py"], root=True, host="n1")
    assert mark.exists()
    site.flag("n1")
    site.sandbox.fault("restart-slurmd", "n1")
    assert site.drained() == []
    site.run("prolog", "n1", SLURM_JOB_ID="99999", SLURM_JOB_UID="65001")
    assert site.drained() == ["n1"]
    assert [entry["ended_job"] for entry in site.records("n1", "epilog_made_up")] == [job]
    assert not mark.exists()


# --- 4: the admin's word ---


def admin_drains(site: Site, name: str, reason: str = ADMIN) -> None:
    site.scontrol("update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")


def meddling(site: Site, when: str, then: str) -> str:
    """A scontrol that is the real one, but for somebody else who is faster by an instant: once, before the call ``when``."""
    path = site.root / "bin" / "scontrol"
    once = site.root / "bin" / "once"
    once.touch()
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *{when}*) if [ -e {once} ]; then rm {once}; {then}; fi ;; esac\nexec /usr/bin/scontrol "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def ours_on(site: Site, name: str) -> nodes.Node:
    """Drain a node through a failing check."""
    # A drain of an admin's that ended within two seconds of ours is taken for one that we wiped; those of earlier tests
    # ended when the nodes were cleared.
    site.sandbox.wait_for(lambda: time.time() > site.cleared_at + 3.0, 60, what="the end of what the last test did")
    site.flag(name)
    site.look(name)
    found = site.node(name)
    assert found.ours is not None
    assert found.ours.check == "site_flag"
    return found


def test_an_admins_drain_is_neither_replaced_nor_returned(site: Site) -> None:
    """nhc#134."""
    admin_drains(site, "n1")
    before = site.node("n1")
    site.flag("n1")
    site.look("n1")
    site.unflag()
    for _ in range(4):
        site.look("n1")
    after = site.node("n1")
    assert (after.reason, after.user, after.since) == (ADMIN, before.user, before.since)
    assert site.say("nodes", "return", "n1").returncode != 0
    assert site.node("n1").reason == ADMIN


def test_an_admin_who_takes_over_our_drain_keeps_it(site: Site) -> None:
    ours_on(site, "n1")
    admin_drains(site, "n1")
    site.unflag()
    for _ in range(4):
        site.look("n1")
    assert site.node("n1").reason == ADMIN
    assert site.records("n1", "drain_gone")


def test_an_admins_drain_between_our_read_and_our_return_is_back_after_us(site: Site) -> None:
    ours_on(site, "n1")
    then = f'/usr/bin/scontrol update NodeName=n1 State=DRAIN "Reason={ADMIN}"'
    site.configure(scontrol=meddling(site, "State=UNDRAIN", then))
    site.unflag()
    site.look("n1")
    assert site.node("n1").drained
    site.look("n1")
    site.sandbox.wait_for(lambda: site.looked("n1").reason == ADMIN, 90, what="the admin's drain")
    assert site.node("n1").drained
    assert site.records("n1", "foreign_drain_restored")
    for _ in range(3):
        site.look("n1")
    assert site.node("n1").reason == ADMIN


def test_an_admins_drain_between_our_read_and_our_drain_is_back_after_us(site: Site) -> None:
    then = f'/usr/bin/scontrol update NodeName=n1 State=DRAIN "Reason={ADMIN}"; sleep 1.1'
    site.configure(scontrol=meddling(site, "State=DRAIN", then))
    site.flag("n1")
    site.look("n1")
    site.sandbox.wait_for(lambda: site.looked("n1").reason == ADMIN, 90, what="the admin's drain")


def test_a_hold_keeps_a_node_out_until_it_is_released(site: Site) -> None:
    ours_on(site, "n1")
    assert site.say("nodes", "hold", "n1", "--reason", "waiting for a part").returncode == 0
    site.unflag()
    for _ in range(4):
        site.look("n1")
    assert site.drained() == ["n1"]
    assert "on hold" in site.say("nodes", "why", "n1").stdout
    assert site.say("nodes", "release", "n1").returncode == 0
    for _ in range(3):
        site.look("n1")
    assert site.drained() == []


def test_a_pending_reboot_is_not_cancelled_by_our_return(site: Site) -> None:
    """nhc#81, #115."""
    job = site.submit("sleep 300\n", "-w", "n1")
    site.wait(job, "RUNNING")
    ours_on(site, "n1")
    site.scontrol("reboot", "ASAP", "nextstate=RESUME", "n1")
    before = site.node("n1")
    assert before.untouchable, before.state
    site.unflag()
    for _ in range(4):
        site.look("n1")
    assert site.node("n1").untouchable == before.untouchable
    assert site.node("n1").drained


def test_a_rebooting_node_is_not_drained_but_looked_at_again_afterwards(site: Site) -> None:
    """nhc#36: planned, powering and rebooting nodes are left alone."""
    job = site.submit("sleep 300\n", "-w", "n1")
    site.wait(job, "RUNNING")
    site.scontrol("reboot", "nextstate=RESUME", "n1")
    before = site.node("n1")
    assert before.untouchable
    site.flag("n1")
    site.look("n1")
    assert site.node("n1").state == before.state
    assert site.records("n1", "not_drained")[0]["decision"] == "leave"


def test_a_drain_set_while_the_node_reboots_holds_after_it(site: Site) -> None:
    site.scontrol("reboot", "nextstate=RESUME", "n1")
    site.sandbox.wait_for(lambda: "REBOOT_ISSUED" in site.node("n1").flags, 90, what="the reboot")
    admin_drains(site, "n1")
    site.sandbox.fault("power-off", "n1")
    # slurmd runs the health check before it registers; the sandbox starts both at once, so the hook comes first by hand
    site.sandbox = Sandbox.up(nodes=4, name=site.sandbox.layout.name, settings=site.settings(HealthCheckInterval=3600))
    site.sandbox.fault("power-on", "n1")
    site.sandbox.wait_for(lambda: "REBOOT_ISSUED" not in site.node("n1").flags, 150, what="the node's return")
    site.sandbox.wait_for(lambda: site.looked("n1").reason == ADMIN, 120, what="the admin's drain")
    assert site.node("n1").drained


def test_a_drain_that_was_taken_away_is_no_drain_of_before_the_boot(site: Site) -> None:
    """Drained, booted by hand, resumed within the first minutes: the admin's last word counts."""
    admin_drains(site, "n1")
    site.look("n1")  # the first look of this boot
    site.scontrol("update", "NodeName=n1", "State=UNDRAIN")
    site.look("n1")
    site.look("n1")
    assert not site.node("n1").drained


def test_our_drain_that_an_admin_took_away_is_not_taken_to_stand(site: Site) -> None:
    """He resumes the node and the check fails on: it is drained anew, and comes back when it is healed."""
    first = ours_on(site, "n1").reason
    site.scontrol("update", "NodeName=n1", "State=RESUME")
    site.run("epilog", "n1", SLURM_JOB_ID="4711", SLURM_JOB_UID="65001")
    again = site.node("n1")
    assert again.ours is not None
    assert again.reason != first
    assert site.records("n1", "drain_gone")
    site.unflag()
    site.comes_back("n1")


def test_two_epilogs_of_one_second_make_one_drain_that_comes_back(site: Site) -> None:
    """The second one replaced the reason, the first one then forgot the drain: the node was out for ever."""
    slow = site.root / "bin" / "scontrol"  # all of them have looked before the first one has written
    slow.write_text('#!/bin/sh\ncase "$*" in *State=DRAIN*) sleep 0.5 ;; esac\nexec /usr/bin/scontrol "$@"\n')
    slow.chmod(0o755)
    site.configure(scontrol=str(slow))
    site.flag("n1")
    ends = [threading.Thread(target=site.run, args=("epilog", "n1"), kwargs={"SLURM_JOB_ID": job, "SLURM_JOB_UID": "65001"})
            for job in ("41", "42", "43")]  # fmt: skip
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert site.drained() == ["n1"]
    # none where the controller did as it was told and answered too late for the hook; a look finds that out
    assert len(site.records("n1", "drained")) <= 1
    site.unflag()
    site.comes_back("n1")


def test_a_verdict_that_waits_drains_nothing_once_its_check_only_observes(site: Site) -> None:
    """The controller was dead, the admin switched the check off meanwhile, or installed the hooks anew."""
    site.configure(scontrol="/nonexistent/scontrol")
    site.flag("n1")
    site.run("epilog", "n1", SLURM_JOB_ID="4711", SLURM_JOB_UID="65001")
    assert [entry["decision"] for entry in site.records("n1", "not_drained")] == ["pending"]
    site.configure()
    text = site.places.config.read_text().replace("mode: drain", "mode: observe")
    site.places.config.write_text(text)
    configuration.compile_file(site.places.config, site.places.compiled)
    site.look("n1")
    site.look("n1")
    assert site.drained() == []
    assert site.records("n1", "pending_dropped")


def test_slurm_calls_what_was_uninstalled_until_it_is_told_and_drains_nothing(site: Site) -> None:
    try:
        install.uninstall(site.places)
        job = site.submit("srun true\n", "-N4")
        site.wait(job, "COMPLETED")
        site.no_job_left()
        assert [name for name in site.sandbox.nodes if site.node(name).out] == []
    finally:
        install.apply(install.plan(site.places))


# --- what jobs say ---


def verdict(site: Site, name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((site.places.state / name / "verdict.json").read_text())["checks"]
    return told


def test_a_hint_of_a_job_makes_root_look_deeper_and_drains_nothing(site: Site) -> None:
    site.configure(contexts="epilog")
    box = site.root / "hints"
    site.look("n1")
    hint = json.dumps({"v": 1, "node": "n1", "job": 7, "cause": "rank_crash", "attempt": 1})
    site.sandbox.exec(["sh", "-c", f"umask 077; echo '{hint}' > {box}/n1/mine"], host="n1", check=True)
    assert site.sandbox.exec(["ls", f"{box}/n1"], host="n1").returncode != 0, "nobody reads what others say"
    site.look("n1")
    assert [(entry["cause"], entry["hinted_job"]) for entry in site.records("n1", "hint")] == [("rank_crash", 7)]
    assert "site_flag" in verdict(site, "n1"), "a check that is the epilog's was made too"
    assert site.drained() == []


def test_a_run_tells_the_node_on_which_a_rank_died_and_root_looks_there(site: Site) -> None:
    """From the supervisor over the agent of that node into root's box, its deeper look and the node's ledger."""
    site.configure(contexts="epilog")
    for name in ("n1", "n2"):
        site.look(name)
        assert "site_flag" not in verdict(site, name), "an ordinary look leaves the epilog's check out"
    shared = site.root / "shared"
    job = site.submit(
        f"""
        export {PLACE}={site.root}/hints
        {sys.executable} -m slurm_resilience run --cold --nodes 2 --run-dir {shared}/run \\
            --set limits.agent_silence_s=15 --set limits.node_silence_s=30 -- bash -c \\
            'if [ "$RANK" = 1 ] && mkdir {shared}/died 2>/dev/null; then sleep 2; kill -9 $$; fi; sleep 4'
        """,
        "-N2", "-w", "n1,n2",
    )  # fmt: skip
    site.wait(job, "COMPLETED", within=300)
    told = {}
    for name in ("n1", "n2"):
        site.look(name)
        told[name] = [(entry["cause"], entry["hinted_job"], entry["uid"] > 0) for entry in site.records(name, "hint")]
    crashed = [name for name in told if told[name]]
    assert [told[name] for name in crashed] == [[("rank_crash", int(job), True)]]
    assert "site_flag" in verdict(site, crashed[0])
    assert site.drained() == []


# --- on the command line ---


def test_by_hand(site: Site) -> None:
    assert site.say("nodes", "drain", "n1", "--reason", "a 'noisy' fan").returncode == 0
    assert site.node("n1").reason.startswith("sr:manual")
    assert site.say("nodes", "drain", "n2", "--reason", "x").returncode != 0, "the budget holds for hands too"
    rows = json.loads(site.say("nodes", "list", "--json").stdout)
    assert [(row["node"], row["ours"], row["check"]) for row in rows] == [("n1", True, "manual")]
    site.flag("n3")
    for _ in range(3):
        site.look("n1")
        site.look("n3")
    assert site.drained() == ["n1"], "what was set by hand is returned by hand"
    assert site.say("nodes", "return", "n1", "--dry-run").returncode == 0
    assert site.drained() == ["n1"]
    assert site.say("nodes", "return", "n1").returncode == 0
    assert site.drained() == []
    assert "no node" in site.say("nodes", "drain", "nn1", "--reason", "x").stderr
    assert [row["node"] for row in json.loads(site.say("nodes", "lemons", "--json").stdout)] == ["n3"]


# --- the Lua plugins ---


@pytest.fixture
def lua(installed: Site) -> Iterator[Site]:
    """Both plugins on, as an admin puts them beside slurm.conf."""
    from slurm_resilience.hooks.admin import entries

    etc = installed.sandbox.layout.etc
    for name in ("job_submit.lua", "cli_filter.lua"):
        (etc / name).write_text(entries.shipped(name))
        (etc / name).chmod(0o644)
    settings = installed.settings(JobSubmitPlugins="lua", CliFilterPlugins="lua")
    installed.sandbox = Sandbox.up(nodes=4, name=installed.sandbox.layout.name, settings=settings)
    installed.sandbox.heal()
    yield installed
    for path in etc.glob("*.lua"):
        path.unlink()
    installed.sandbox = Sandbox.up(nodes=4, name=installed.sandbox.layout.name, settings=installed.settings())


def described(site: Site, *options: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """The job as slurmctld took it; held, so that it does not run."""
    argv = ["sbatch", "--parsable", "--hold", f"--output={site.root}/shared/x", *options, "--wrap", "sleep 1"]
    done = site.sandbox.exec(argv, cwd="/tmp", env=env)
    if done.returncode:
        return {"refused": done.stderr}
    job = site.sandbox.job(done.stdout.strip())
    shown = site.sandbox.slurm(["scontrol", "show", "job", done.stdout.strip()]).stdout
    script = site.sandbox.slurm(["squeue", "-h", "-o", "%k", "-j", done.stdout.strip()]).stdout
    return {**job, "shown": shown, "comment": script.strip()}


def test_a_job_that_asks_to_be_resilient_gets_what_it_needs(lua: Site) -> None:
    job = described(lua, "--comment=resilient run 7", "--time=10")
    assert job["Requeue"] == "1"
    assert job["comment"] == "resilient run 7"
    out = lua.root / "shared" / "appended"
    argv = ["sbatch", "--parsable", f"--output={out}", "--comment=resilient", "--time=10", "--wrap", "echo x"]
    for _ in range(2):
        number = lua.sandbox.exec(argv, cwd="/tmp", check=True).stdout.strip()
        lua.wait(number, "COMPLETED")
    lua.sandbox.wait_for(lambda: out.read_text() == "x\nx\n", 90, what="both outputs in one file")


def test_the_warning_comes_before_the_limit_as_if_asked_for(lua: Site) -> None:
    out = lua.root / "shared" / "warned"
    script = f"srun bash -c 'trap \"echo warned > {out}; exit 0\" USR2; for i in $(seq 900); do sleep 0.2; done'\n"
    job = lua.submit(script, "--comment=resilient", "--time=2")
    lua.wait(job, "COMPLETED", within=120)
    assert out.read_text() == "warned\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--no-requeue", "--time=10"], "leave --no-requeue away"),
        (["--time=1"], "at least 2 minutes"),
        (["--time=10", "--signal=USR1@900"], "make the lead shorter"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(options: list[str], says: str, lua: Site) -> None:
    assert says in described(lua, "--comment=resilient", *options)["refused"]


def test_any_other_job_passes_untouched(lua: Site) -> None:
    for options in (
        ["--no-requeue", "--time=1"],
        ["--comment=resiliently", "--no-requeue"],
        ["--comment=not resilient", "--no-requeue"],
    ):
        assert described(lua, *options)["Requeue"] == "0"


def test_the_environment_asks_too(lua: Site) -> None:
    assert described(lua, "--comment=mine", "--time=10", env={"SLURM_RESILIENT": "1"})["comment"] == "resilient mine"
    assert described(lua, "--time=10", env={"SLURM_RESILIENT": "1"})["comment"] == "resilient"
    assert described(lua, "--comment=mine", env={"SLURM_RESILIENT": "0"})["comment"] == "mine"


def test_a_sites_own_lua_is_asked_first_and_an_error_in_ours_lets_the_job_pass(lua: Site) -> None:
    etc = lua.sandbox.layout.etc
    (etc / "job_submit_site.lua").write_text(
        "function slurm_job_submit(job, parts, uid)\n"
        "  if job.name == 'forbidden' then slurm.log_user('the site says no'); return slurm.ERROR end\n"
        "  return slurm.SUCCESS\nend\n"
        "function slurm_job_modify(job, record, parts, uid) return slurm.SUCCESS end\n"
    )
    ours = etc / "job_submit.lua"
    text = ours.read_text()
    ours.write_text(text + "\n")  # slurmctld reads it again when it has changed
    os.utime(ours, (time.time() + 5, time.time() + 5))
    assert "the site says no" in described(lua, "--job-name=forbidden", "--comment=resilient", "--time=10")["refused"]
    assert described(lua, "--comment=resilient", "--time=10")["Requeue"] == "1"
    ours.write_text(text.replace("local minutes = job.time_limit", "local minutes = nothing.at_all"))
    os.utime(ours, (time.time() + 10, time.time() + 10))
    assert described(lua, "--comment=resilient", "--no-requeue")["Requeue"] == "0"
    assert "the job passes" in lua.sandbox.layout.log_of("slurmctld").read_text()
