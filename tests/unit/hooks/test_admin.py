"""Configuration, installation, inspection, suspects, hints: typos refused, twice is once, and what was there comes back."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.hooks import checks, comeback, engine, evict, hints, metrics, periodic, settle, world
from slurm_resilience.hooks.admin import configuration, entries, inspect, install, lemons, promised
from slurm_resilience.hooks.admin.conformance import tool, tool_by_argument
from slurm_resilience.hooks.admin.entries import Places
from slurm_resilience.hooks.checks import Result
from slurm_resilience.hooks.engine import Plan
from slurm_resilience.hooks.nodes import Node


@pytest.fixture
def root_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="srh-unit-", dir="/opt"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def places(root_folder: Path) -> Places:
    return Places(root_folder / "prefix", root_folder / "etc" / "hooks.yaml", root_folder / "state", install.python_of(None))


# --- the configuration ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mode: drian", "drain"),
        ("budgt: {}", "'budgt'"),
        ("budget: {max_node: 1}", "max_nodes"),
        ("budget: {max_nodes: many}", "max_nodes"),
        ("budget: {max_nodes: -1}", "max_nodes"),
        ("checks: {gppu: {}}", "gpu"),
        ("checks: {gpu: {optons: {}}}", "options"),
        ("checks: {gpu: {options: {cuont: 4}}}", "count"),
        ("checks: {gpu: {options: {nvidia_smi: nvidia-smi}}}", "absolute"),
        ("checks: {gpu: {options: {count: eight}}}", "count"),
        ("checks: {leftovers: {options: {fix: 1}}}", "fix"),
        ("checks: {infiniband: {options: {ports: mlx5_0}}}", "list"),
        ("checks: {infiniband: {options: {ports: [mlx5_0]}}}", "no such name"),
        ("checks: {services: {options: {names: [--all]}}}", "no such name"),
        ("checks: {filesystem: {options: {paths: [{path: /x, mount: 1}]}}}", "mount"),
        ("checks: {gpu: {contexts: [prologue]}}", "prolog"),
        ("checks: {gpu: {severity: bad}}", "drain_now"),
        ("checks: {gpu: {timeout_s: 0}}", "above 0"),
        ("checks: {gpu: {nodes: [{options: {}}]}}", "match"),
        ("checks: {gpu: {nodes: [{match: 'n[1-3', mode: drain}]}}", "match"),
        ("checks: {gpu: {}}\nchecks: {cpu: {}}", "twice"),
        ("checks: {gpu: {mode: drain, mode: off}}", "twice"),
        ("checks: {site: {command: check.sh}}", "absolute"),
        ("checks: {Site-1: {command: /x}}", "a-z"),
        ("checks: [gpu]", "mapping"),
        ("slurm: {scontrol: scontrol}", "absolute"),
        ("expedite: {jobs: some}", "resilient"),
        ("drain_now: {requeue: some}", "resilient"),
        ("a: [", "not YAML"),
        ("- 1", "mapping"),
    ],
)
def test_a_typo_is_refused_with_the_right_word(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.compile_text(text)
    assert says in str(caught.value)


def test_the_shipped_configuration_observes_and_every_default_is_filled_in() -> None:
    compiled = configuration.compile_text(configuration.DEFAULT_TEXT)
    assert {entry["mode"] for entry in compiled["checks"].values()} == {"observe"}
    assert compiled["checks"]["memory"]["contexts"] == ["prolog", "epilog", "periodic", "boot"]
    assert configuration.compile_text("mode: off\nchecks: {cpu: {}}")["checks"]["cpu"]["mode"] == "off"
    assert set(configuration.OPTIONS) == set(checks.ALL)


def test_what_is_compiled_is_what_the_hooks_believe_until_the_source_changes(places: Places) -> None:
    install.apply(install.plan(places))
    assert world.load_settings(str(places.compiled))["checks"]
    places.config.write_text(places.config.read_text() + "\n# x\n")
    with pytest.raises(world.BadSettings, match="changed after"):
        world.load_settings(str(places.compiled))


def test_a_change_is_rolled_back_to_what_was_compiled_before(places: Places) -> None:
    install.apply(install.plan(places))
    first = places.config.read_text()
    with pytest.raises(ConfigError, match="no configuration before"):
        configuration.roll_back(places.config, places.compiled)
    places.config.write_text("mode: drain\nchecks: {cpu: {}}\n")
    configuration.compile_file(places.config, places.compiled)
    places.config.write_text("mode: [broken")
    assert configuration.roll_back(places.config, places.compiled)["checks"]["memory"]["mode"] == "observe"
    assert places.config.read_text() == first
    assert world.load_settings(str(places.compiled))["checks"]
    configuration.roll_back(places.config, places.compiled)
    assert json.loads(places.compiled.read_text())["checks"]["cpu"]["mode"] == "drain", "and forth"


# --- installing ---

SLURM_CONF = "ClusterName=x\nprolog = /site/prolog # ours\nEpilog=/site/epilog.d/*\nHealthCheckInterval=0\nNodeName=n1\n"


def conf(root: Path) -> Path:
    path = root / "slurm.conf"
    path.write_text(SLURM_CONF)
    return path


def test_install_twice_is_once_and_uninstall_restores(places: Places, root_folder: Path) -> None:
    path = conf(root_folder)
    assert install.apply(install.plan(places, slurm_conf=path), write_slurm_conf=True)
    text = path.read_text()
    assert f"Prolog={places.entry('prolog')}" in text
    assert "HealthCheckInterval=300" in text
    assert "NodeName=n1" in text
    assert (root_folder / "slurm.conf.before-slurm-resilience").read_text() == SLURM_CONF
    assert "chained='/site/prolog'" in places.entry("prolog").read_text()
    assert "slurm_job_submit" in (places.prefix / "lua" / "job_submit.lua").read_text()
    assert install.apply(install.plan(places, slurm_conf=path), write_slurm_conf=True) == []
    assert "chained='/site/prolog'" in places.entry("prolog").read_text(), "we do not chain ourselves"
    install.uninstall(places, slurm_conf=path)
    after = install.settings_of(path)
    assert (after["Prolog"], after["Epilog"], after["HealthCheckInterval"]) == ("/site/prolog", "/site/epilog.d/*", "0")
    assert "EpilogSlurmctld" not in after
    assert "HealthCheckProgram" not in after
    assert not places.library.exists()
    assert places.config.exists(), "the configuration is the admin's"


def test_uninstall_leaves_a_prolog_that_the_admin_has_changed_since(places: Places, root_folder: Path) -> None:
    path = conf(root_folder)
    install.apply(install.plan(places, slurm_conf=path), write_slurm_conf=True)
    path.write_text(path.read_text().replace(f"Prolog={places.entry('prolog')}", "Prolog=/new/one"))
    install.uninstall(places, slurm_conf=path)
    assert install.settings_of(path)["Prolog"] == "/new/one"


def test_a_folder_of_site_scripts_runs_as_slurm_runs_it_but_for_what_is_no_script(places: Places, root_folder: Path) -> None:
    """22.05 runs z before a and 9 before 0, and drains for a README; tried on a real one."""
    folder = root_folder / "epilog.d"
    folder.mkdir()
    log = root_folder / "log"
    for name in ("10-a", "20-b", "aa", "Zz", "30 odd"):
        script = tool(folder / name)
        script.write_text(f'#!/bin/sh\nbasename "$0" >> {log}\n')
    (folder / "README").write_text("read me")
    (folder / "sub").mkdir()
    chain = root_folder / "chain"
    chain.write_text(entries.chain_of(f"{folder}/*"))
    chain.chmod(0o755)
    assert subprocess.run([str(chain)], check=False).returncode == 0
    assert sorted(log.read_text().splitlines()) == ["10-a", "20-b", "30 odd", "Zz", "aa"]
    assert [name for name in log.read_text().splitlines() if name[0].isdigit()] == ["30 odd", "20-b", "10-a"]
    tool(folder / "20-b", code=4)
    log.unlink()
    assert subprocess.run([str(chain)], check=False).returncode == 4
    assert "10-a" not in log.read_text().split()
    empty = root_folder / "empty"
    empty.write_text(entries.chain_of(f"{root_folder}/nothing.d/*"))
    empty.chmod(0o755)
    assert subprocess.run([str(empty)], check=False).returncode == 0


def test_a_node_image_gets_the_same_paths(places: Places, root_folder: Path) -> None:
    image = root_folder / "image"
    image.mkdir()
    inside = Places(Path("/usr/lib/sr"), Path("/etc/sr/hooks.yaml"), Path("/var/lib/sr"), places.python)
    install.apply(install.plan(inside, root=image))
    entry = (image / "usr/lib/sr/bin/prolog").read_text()
    assert "config='/etc/sr/hooks.json'" in entry
    assert str(image) not in entry
    assert json.loads((image / "etc/sr/hooks.json").read_text())["source"] == "/etc/sr/hooks.yaml"


def test_a_place_that_others_can_write_is_refused(tmp_path: Path, places: Places) -> None:
    bad = Places(tmp_path / "prefix", places.config, places.state, places.python)
    with pytest.raises(ConfigError, match="root must not run"):
        install.plan(bad)
    with pytest.raises(ConfigError, match="root must not run"):
        install.python_of(str(shutil.copy2(places.python, tmp_path / "python")))


# --- inspecting ---


def findings(found: list[inspect.Finding]) -> str:
    return "\n".join(f"{each.level}: {each.text}" for each in found)


def test_an_installation_in_order_has_no_errors(places: Places) -> None:
    install.apply(install.plan(places))
    places.config.write_text("slurm: {scontrol: /bin/true, squeue: /bin/true, sacctmgr: /bin/true}\n")
    configuration.compile_file(places.config, places.compiled)
    assert inspect.inspect(places, None) == []
    places.entry("prolog").chmod(0o644)
    assert "not executable" in findings(inspect.inspect(places, None))
    places.entry("prolog").chmod(0o777)
    assert "written by others" in findings(inspect.inspect(places, None))


def test_what_would_drain_nodes_is_said_before_slurm_does_it(root_folder: Path) -> None:
    """ubuntu-slurm#4, ansible-role-slurm#127."""
    folder = root_folder / "prolog.d"
    folder.mkdir()
    value = f"{folder}/*"
    assert "matches nothing" in findings(inspect.scripts("Prolog", value))
    tool(folder / "10-good")
    assert inspect.scripts("Prolog", value) == []
    (folder / "README").write_text("x")
    (folder / "sub").mkdir()
    tool(folder / "10-good~")
    said = findings(inspect.scripts("Prolog", value))
    assert "README is not executable" in said
    assert "sub is a folder" in said
    assert "backup" in said
    assert "does not exist" in findings(inspect.scripts("Prolog", "/nonexistent"))


def test_slurm_conf_is_looked_at(places: Places, root_folder: Path) -> None:
    install.apply(install.plan(places))
    path = root_folder / "slurm.conf"
    path.write_text("HealthCheckProgram=/x\nSchedulerParameters=nohold_on_prolog_fail\nHealthCheckNodeState=IDLE\n")
    said = findings(inspect.inspect(places, path))
    for word in ("has no Prolog", "nohold_on_prolog_fail", "HealthCheckInterval=0", "not ANY", "PrologEpilogTimeout"):
        assert word in said


NODES_CONF = """\
NodeName=DEFAULT CPUs=8 RealMemory=24000
NodeName=n[1-4] State=UNKNOWN  # the small ones
NodeName=big[01-02] \\
    Sockets=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=2000000
Include more.conf
"""


def test_cpus_and_memory_are_compared_with_slurm_conf(places: Places, root_folder: Path) -> None:
    conf = root_folder / "slurm.conf"
    conf.write_text(NODES_CONF)
    (root_folder / "more.conf").write_text("NodeName=x Boards=2 SocketsPerBoard=2 CoresPerSocket=4\n")
    rules = {rule["match"]: (rule.get("count"), rule.get("real_memory_mb")) for rule in promised.rules_of(conf)}
    assert rules == {"n[1-4]": (8, 24000), "big[01-02]": (256, 2000000), "x": (16, 24000)}
    install.apply(install.plan(places, slurm_conf=conf), write_slurm_conf=True)
    assert "Prolog=" in conf.read_text(), "what else changes in slurm.conf is no other promise"
    assert "promises something else" not in findings(inspect.inspect(places, conf))
    settings = world.load_settings(str(places.compiled))

    def options(node: str) -> dict[str, dict[str, object]]:
        here = world.World("test", node, settings, "", {}, 1.0)
        return {plan.name: plan.options for plan in engine.plans(here, "periodic") if plan.name in engine.PROMISED}

    assert options("n2") == {"cpu": {"count": 8}, "memory": {"real_memory_mb": 24000}}
    assert options("stranger") == {"cpu": {}, "memory": {}}
    conf.write_text(NODES_CONF.replace("RealMemory=24000", "RealMemory=20000"))
    assert "promises something else" in findings(inspect.inspect(places, conf))
    assert options("n2") == {"cpu": {}, "memory": {}}, "an old promise drains nobody"
    conf.unlink()
    assert options("big01")["memory"] == {"real_memory_mb": 2000000}, "a configless node has no file of its own"


# --- what follows from an answer ---


@pytest.mark.parametrize(
    ("mode", "status", "blame", "severity", "fails", "wish"),
    [
        ("drain", "fail", "node", "drain", 1, "drain"),
        ("comment", "fail", "node", "drain", 1, "comment"),
        ("observe", "fail", "node", "drain", 1, "observe"),
        ("drain", "fail", "job", "drain", 9, "comment"),
        ("drain", "fail", "node", "flag", 9, "comment"),
        ("drain", "unknown", "node", "drain_now", 99, "off"),
        ("drain", "warn", "node", "drain_now", 99, "off"),
        ("drain", "ok", "node", "drain", 99, "off"),
    ],
)
def test_what_an_answer_asks_for(mode: str, status: str, blame: str, severity: str, fails: int, wish: str) -> None:
    plan = Plan("gpu", {"mode": mode})
    assert settle.wish(plan, Result(status, blame=blame, severity=severity), fails) == wish


def test_hysteresis() -> None:
    plan = Plan("gpu", {"mode": "drain", "after_fails": 3})
    assert [settle.wish(plan, Result("fail"), fails) for fails in (1, 2, 3)] == ["off", "off", "drain"]


OURS: dict[str, object] = {"reason": "sr:gpu x", "user": "root", "since": 100.0, "at": 100.0, "check": "gpu"}


def test_a_drain_stands_for_as_long_as_the_clock_that_does_not_jump_says() -> None:
    at, steady = time.time() - time.monotonic() - 7200, time.monotonic() - 30
    assert comeback.held_s({"at": at, "steady": steady, "boot": "b"}, "b") == pytest.approx(30, abs=5)
    assert comeback.held_s({"at": at, "steady": steady, "boot": "b"}, "another") == pytest.approx(
        time.monotonic() + 7200, abs=5
    )


def drained(
    state: str = "IDLE+DRAIN", reason: str = "sr:gpu x", user: str = "root", since: float = 100.0, comment: str = ""
) -> Node:
    return Node("n1", state, "low", reason, user, since, comment)


@pytest.mark.parametrize(
    ("node", "passes", "held_s", "today", "why"),
    [
        (drained(), 3, 700, 0, ""),
        (drained(), 2, 700, 0, "passes"),
        (drained(), 3, 500, 0, "at least"),
        (drained(), 3, 700, 3, "left for a human"),
        (drained(comment="{sr:hold node 5 bob}"), 3, 700, 0, "hold"),
        (drained(reason="ADMIN"), 3, 700, 0, "gone"),
        (drained(user="bob"), 3, 700, 0, "gone"),
        (drained(since=101.0), 3, 700, 0, "gone"),
        (drained(state="IDLE"), 3, 700, 0, "gone"),
        (drained(state="IDLE+DRAIN+REBOOT_REQUESTED"), 3, 700, 0, "REBOOT"),
        (drained(state="DOWN+DRAIN"), 3, 700, 0, "DOWN"),
        (None, 3, 700, 0, "not know"),
    ],
)
def test_when_a_node_may_come_back(node: Node | None, passes: int, held_s: float, today: int, why: str) -> None:
    said = comeback.may_return(node, OURS, passes, 3, held_s, 600, today, 3)
    assert (why in said) if why else said == ""


@pytest.mark.parametrize(
    ("others", "well"),
    [
        ([], True),
        ([Result("warn", check="oom")], True),
        ([Result("fail", check="pcie", severity="flag")], True),
        ([Result("fail", check="gpu_strangers", blame="job")], True),
        ([Result("fail", check="memory")], False),
        ([Result("unknown", check="dcgm", severity="flag")], False),
        ([Result("fail", check="gpu", severity="flag")], False),
    ],
)
def test_what_keeps_a_drained_node_out(others: list[Result], well: bool) -> None:
    here = world.World("test", "n1", {"checks": {"gpu": {}}}, "", {}, 1.0)
    results = [*others, *([] if others and others[0].check == "gpu" else [Result("ok", check="gpu")])]
    assert periodic._well(here, results, "gpu") is well


# --- hints from jobs ---


def hint_world(box: Path, state: Path) -> world.World:
    return world.World("test", "n1", {"hints": {"box": str(box.parent)}}, str(state), {}, 10.0)


def put(box: Path, name: str, value: Any, uid: int = 2001) -> None:
    path = box / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    os.chown(path, uid, uid)


def test_a_hint_is_reduced_to_what_we_know_and_rubbish_is_thrown_away(tmp_path: Path) -> None:
    box = Path(hints.prepare(str(tmp_path / "box"), "n1"))
    assert box.stat().st_mode & 0o7777 == 0o1733
    good = {"v": 1, "node": "n1", "job": 12, "cause": "rank_crash", "attempt": 2, "x": "$(reboot)\n"}
    put(box, "good", good)
    put(box, "other-node", {**good, "node": "n2"})
    put(box, "no-cause", {**good, "cause": "'; reboot; '"})
    put(box, "big", "x" * 10_000)
    put(box, "torn", '{"v": 1,')
    put(box, "list", [1])
    (box / "link").symlink_to("/etc/shadow")
    os.mkfifo(box / "fifo")
    (box / "empty").mkdir()
    (box / "folder").mkdir()
    (box / "folder" / "x").touch()
    found = hints.collect(hint_world(box, tmp_path))
    assert found == [{"cause": "rank_crash", "uid": 2001, "hinted_job": 12, "hinted_attempt": 2}]
    assert list(box.iterdir()) == [], "a folder full of files would keep others' hints out for ever"
    assert hints.collect(hint_world(tmp_path / "none" / "n1", tmp_path)) == []


def test_many_hints_take_no_long_time_and_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, looked = hints._read, list[str]()
    monkeypatch.setattr(hints, "_read", lambda at, name, node: looked.append(name) or read(at, name, node))
    box = Path(hints.prepare(str(tmp_path / "box"), "n1"))
    for index in range(500):
        (box / str(index)).write_text("x")
    assert hints.collect(hint_world(box, tmp_path)) == []
    assert len(looked) == hints.MOST_OF_ONE_USER
    assert list(box.iterdir()) == []


def test_one_user_cannot_keep_another_ones_hint_from_being_read(tmp_path: Path) -> None:
    box = Path(hints.prepare(str(tmp_path / "box"), "n1"))
    good = {"v": 1, "node": "n1", "cause": "hang"}
    for index in range(200):
        put(box, f"a{index}", good, uid=2001)
    put(box, "z", good, uid=2002)
    found = hints.collect(hint_world(box, tmp_path))
    assert [hint["uid"] for hint in found].count(2001) == hints.MOST_OF_ONE_USER
    assert [hint["uid"] for hint in found].count(2002) == 1


def test_under_run_the_box_cannot_fill_what_the_node_needs() -> None:
    root = Path(f"/run/srh-unit-{os.getpid()}")
    try:
        try:
            box = Path(hints.prepare(str(root), "n1"))
        except OSError:
            assert list(root.iterdir()) == [], "without a size of its own there is no box"
            pytest.skip("not run: may not mount here")
        with pytest.raises(OSError, match="No space left"):
            (box / "flood").write_bytes(b"x" * (2 << 20))
        assert Path(hints.prepare(str(root), "n1")) == box, "twice is once"
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]
        assert len(mounts) == 1
    finally:
        subprocess.run(["umount", str(root)], check=False, capture_output=True)
        root.rmdir()


# --- metrics ---


def test_the_metrics_say_what_was_seen_how_long_it_took_and_what_was_decided(tmp_path: Path) -> None:
    here = world.World("healthcheck", "n1", {"metrics": {"folder": str(tmp_path)}}, str(tmp_path), {}, 10.0)
    result = Result("fail", check="gpu")
    result.took_s = 0.25
    engine.remember(here, [Result("ok", check="gpu"), Result("ok", check="cpu")])
    told = engine.remember(here, [result])
    (tmp_path / "decisions.json").write_text('{"spent": 2}')
    (tmp_path / "budget.json").write_text('{"nodes": 40, "out": 2, "allowed": 2, "at": 1}')
    metrics.write(here, told, 1.5)
    said = (tmp_path / "slurm_resilience_n1.prom").read_text().splitlines()
    for line in (
        'slurm_resilience_check_status{node="n1",check="gpu"} 2',
        'slurm_resilience_check_duration_seconds{node="n1",check="gpu"} 0.25',
        'slurm_resilience_check_verdicts_total{node="n1",check="gpu",status="fail"} 1',
        'slurm_resilience_check_verdicts_total{node="n1",check="gpu",status="ok"} 1',
        'slurm_resilience_drain_decisions_total{node="n1",decision="spent"} 2',
        'slurm_resilience_budget_nodes{node="n1",what="allowed"} 2',
        'slurm_resilience_run_duration_seconds{node="n1"} 1.500',
        'slurm_resilience_drained_by_us{node="n1"} 0',
    ):
        assert line in said
    families = [line.split()[2] for line in said if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "the collector refuses a family that is named twice"
    assert "slurm_resilience_check_last_run_timestamp_seconds" in families


# --- a node that has to go at once ---


@pytest.mark.parametrize(("whose", "requeued"), [("off", []), ("resilient", ["12"]), ("all", ["12", "13"])])
def test_what_runs_on_a_node_that_has_to_go_at_once_goes_back_into_the_queue(
    whose: str, requeued: list[str], tmp_path: Path
) -> None:
    squeue = tool_by_argument(
        tmp_path / "squeue", {"%A": ("11\n12\n13\n", 0), "12 -O": ("resilient run\n99 resilient\n", 0), "-O": ("my job\n", 0)}
    )
    log = tmp_path / "log"
    scontrol = tool(tmp_path / "scontrol")
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\n')
    slurm = {"squeue": str(squeue), "scontrol": str(scontrol)}
    job = {"SLURM_JOB_ID": "11", "SLURM_JOB_UID": "2001"}  # the one whose epilog this is
    here = world.World("epilog", "n1", {"slurm": slurm, "drain_now": {"requeue": whose}}, str(tmp_path), job, 10.0)
    evict.requeue_jobs(here)
    said = log.read_text().splitlines() if log.exists() else []
    assert said == [f"requeue {job}" for job in requeued]


# --- suspects ---


def entry(what: str, **fields: Any) -> dict[str, Any]:
    return {"what": what, "at": 1000.0, **fields}


def test_lemons_are_ranked_with_their_numbers() -> None:
    bad = [entry("drained", check="gpu"), entry("drained", check="xid"), entry("check", check="xid", word="79"),
           *[entry("job_ended", status=256, uid=uid, nodes=8) for uid in (1, 2, 3)]]  # fmt: skip
    one_user = [entry("job_ended", status=256, uid=7, nodes=8) for _ in range(50)]
    suspects = [lemons.signals("bad", bad, 0), lemons.signals("one-user", one_user, 0)]
    suspects += [lemons.signals(f"n{index}", [], 0) for index in range(8)]
    ranked = lemons.rank(suspects)
    assert ranked[0].node == "bad"
    assert (ranked[0].times_out, ranked[0].xids, ranked[0].multi_node_failures, ranked[0].users) == (2, 1, 3, 3)
    assert next(each for each in ranked if each.node == "one-user").score == 0, "one user's broken program is no evidence"
    assert lemons.signals("old", bad, since=2000.0).times_out == 0
    assert lemons.rank([]) == []


# --- on the command line ---


def cli(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurm_resilience", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_install_check_simulate_status_uninstall(places: Places) -> None:
    where = ["--prefix", str(places.prefix), "--config", str(places.config), "--state", str(places.state)]
    dry = cli("hooks", "install", *where, "--dry-run", "--json")
    assert json.loads(dry.stdout)["dry_run"] is True, dry.stderr
    assert not places.prefix.exists()
    assert cli("hooks", "install", *where, "--only", "prolog").returncode == 0
    assert places.entry("prolog").exists()
    assert not places.entry("epilog").exists()
    places.config.write_text("checks: {memory: {options: {real_memory_mb: 100000000}}}\nslurm: {scontrol: /bin/true, "
                             "squeue: /bin/true, sacctmgr: /bin/true}\n")  # fmt: skip
    assert cli("hooks", "check", *where).returncode == 1, "it was not compiled"
    assert cli("hooks", "check", *where, "--write").returncode == 0
    rows = json.loads(cli("hooks", "simulate", *where, "--json").stdout)
    assert [(row["check"], row["status"], row["would"]) for row in rows] == [("memory", "fail", "observe")]
    subprocess.run([str(places.entry("prolog"))], env={"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1"}, check=True)
    status = json.loads(cli("hooks", "status", *where, "--json").stdout)
    assert status["n1"]["would_drain"] == {"memory": 1}
    assert cli("hooks", "uninstall", *where, "--purge").returncode == 0
    assert not places.prefix.exists()
    assert not places.state.exists()
