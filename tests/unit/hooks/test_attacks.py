"""Users, crashes and spoilt files against the hooks: none switches them off, none makes root lose, run or drain something."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.hooks import child, comeback, drain, engine, expedite, files, hints, marks, periodic, world
from slurm_resilience.hooks.admin import configuration, install
from slurm_resilience.hooks.admin.conformance import Case, answer, tool
from slurm_resilience.hooks.admin.entries import Places
from slurm_resilience.hooks.checks import leftovers
from tests.unit.hooks.test_survival import JOB, call, errors, places, reconfigure, root_folder
from tests.unit.hooks.ticks import age_files

__all__ = ["places", "root_folder"]
UID = 65001
BOOT = world.boot_id()


def owned(path: Path) -> Path:
    os.chown(path, UID, UID, follow_symlinks=False)
    return path


def state_of(places: Places) -> Path:
    return Path(files.private_folder(str(places.state / "n1")))


# --- what users leave for root ---


def test_a_hint_that_breaks_the_parser_switches_nothing_off(places: Places) -> None:
    """Nested deeper than Python goes, it was a RecursionError in every periodic check from then on."""
    reconfigure(places, "mode: observe\nchecks: {memory: {options: {real_memory_mb: 1}}}\n")
    box = Path(hints.prepare(str(places.prefix / "hints"), "n1"))
    for name, text in (("a", "[" * 4000), ("b", '{"v":' * 800)):
        (box / name).write_text(text)
        owned(box / name)
    (box / "c").write_text(json.dumps({"v": 1, "node": "n1", "cause": "hang"}))
    owned(box / "c")
    found = call(places, "healthcheck")
    assert (state_of(places) / "verdict.json").exists()
    assert [entry["cause"] for entry in found if entry["what"] == "hint"] == ["hang"]
    assert errors(found) == ""
    assert list(box.iterdir()) == []


def test_an_error_in_one_step_leaves_the_others(places: Places) -> None:
    (places.library / "hints.py").write_text("raise_here\n")
    (places.library / "recheck.py").write_text("def unfinished_epilogs(world): raise RuntimeError('boom')\n")
    (places.library / "hints.py").write_text("def collect(world): raise RuntimeError('bang')\n")
    found = call(places, "healthcheck")
    assert "boom" in errors(found)
    assert "bang" in errors(found)
    assert (state_of(places) / "verdict.json").exists()
    (state_of(places) / "verdict.json").unlink()
    call(places, "prolog")
    assert (state_of(places) / "verdict.json").exists()


def test_files_that_came_after_slurm_was_asked_are_another_jobs(tmp_path: Path) -> None:
    """A new job of the same user may start while we clean behind the last one."""
    folder, squeue = tmp_path / "tmp", tool(tmp_path / "squeue")
    folder.mkdir()
    for name in ("old", "new"):
        (folder / name).touch()
        owned(folder / name)
    age_files()
    # The new job starts while squeue answers
    squeue.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(0.1)\nopen({str(folder / 'new')!r}, 'w').write('x')\n")
    options: dict[str, object] = {"fix": True, "paths": [str(folder)], "squeue": str(squeue)}
    said = answer("tmpfiles", Case(options, job="7", uid=UID), tmp_path)
    assert [path.name for path in folder.iterdir()] == ["new"], said.text


def test_a_folder_that_is_bound_into_another_is_not_of_it(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "tmp"
    for path in (home, folder, folder / "mine", folder / "mine" / "home"):
        path.mkdir()
        owned(path)
    owned(home).joinpath("thesis").write_text("x")
    owned(home / "thesis")
    if subprocess.run(["mount", "--bind", str(home), str(folder / "mine" / "home")], check=False).returncode:
        pytest.skip("not run: may not mount here")
    try:
        time.sleep(0.05)
        options: dict[str, object] = {"fix": True, "paths": [str(folder)], "squeue": str(tool(tmp_path / "squeue"))}
        said = answer("tmpfiles", Case(options, job="7", uid=UID), tmp_path)
        assert (home / "thesis").exists(), said.text
        assert said.word == "kept"
    finally:
        subprocess.run(["umount", str(folder / "mine" / "home")], check=True)


def test_a_killed_process_that_has_not_died_yet_is_no_broken_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fork bomb on two CPUs, or a terabyte to give back: only what sleeps uninterruptibly is stuck."""
    monkeypatch.setattr(leftovers, "_kill", lambda host, process: None)
    slow = subprocess.Popen(["/bin/sleep", "60"], env={"SLURM_JOB_ID": "7"}, user=UID, group=UID)
    try:
        said = answer("leftovers", Case({"fix": True}, job="7", uid=UID), tmp_path)
        assert (said.status, said.blame) == ("warn", "job"), said.text
    finally:
        slow.kill()
        slow.wait()


# --- killed in the middle ---


def test_a_mark_whose_writer_was_killed_is_none(places: Places) -> None:
    """The epilog of that job was made up for in every prolog, for ever."""
    folder = Path(files.private_folder(str(state_of(places) / marks.FOLDER)))
    whole = json.dumps({"job": "12", "uid": UID, "boot": BOOT, "pid": 2**22 - 1, "start": "1", "at": 1})
    torn, spoilt = folder / "12.json.999.tmp", folder / "13.json"
    torn.write_text(whole)
    spoilt.write_text('{"job": "x", "pid": "y"}')
    found = call(places, "prolog")
    assert [entry["ended_job"] for entry in found if entry["what"] == "epilog_made_up"] == ["13"]
    assert not spoilt.exists()
    old = time.time() - 7200
    for path in (torn, state_of(places) / "verdict.json.1.tmp", state_of(places) / ".probe.1"):
        path.write_text(whole)
        os.utime(path, (old, old))
    found = call(places, "healthcheck")
    assert errors(found) == ""
    assert [path.name for path in state_of(places).rglob("*") if "tmp" in path.name or "probe" in path.name] == []


@pytest.mark.parametrize("spoilt", [[], "x", {"at": "x", "boot": [], "checks": {"memory": {"status": "ok", "fails": "x"}}}])
def test_state_of_any_shape_is_no_state_and_heals(spoilt: Any, places: Places) -> None:
    reconfigure(places, "mode: observe\nchecks: {memory: {contexts: [prolog, periodic, boot]}, clock: {}, oom: {}, xid: {}}\n")
    folder = state_of(places)
    files.private_folder(str(folder / marks.FOLDER))
    fill = spoilt if not isinstance(spoilt, dict) else {**spoilt, "boot": BOOT, "wall": "x", "number": "x", "cursor": spoilt,
                                                        "lasting": spoilt, "foreign": {"a": 1}, "watch": False}  # fmt: skip
    for name in (
        "verdict",
        "pending",
        "returns",
        "booted",
        "flags",
        "decisions",
        "budget",
        "memo-clock",
        "memo-oom",
        "memo-xid",
    ):
        (folder / f"{name}.json").write_text(json.dumps(fill))
    for kind in ("healthcheck", "prolog", "epilog"):
        call(places, kind)
    found = call(places, "healthcheck")
    assert errors(found) == ""
    told = json.loads((folder / "verdict.json").read_text())["checks"]
    assert told["memory"]["status"] == told["clock"]["status"] == "ok"
    assert "ValueError" not in json.dumps(told)


def test_a_child_that_hangs_for_ever_does_not_keep_the_lock(tmp_path: Path) -> None:
    """One look that a dead file server held in the kernel was the last one: every next one was an overlap."""
    for kills in (False, True):
        lock = files.Lock(str(tmp_path / "lock"))
        assert lock.acquire()
        running = child.start(lambda: str(time.sleep(600)), "hangs")
        if kills:
            os.close(lock.fd)  # as when we are killed
            files.HELD.clear()
        else:
            lock.release()
        again = files.Lock(str(tmp_path / "lock"))
        assert again.acquire(60.0)
        again.release()
        os.kill(running.pid, 9)
        running.finish(60.0)


def test_no_foreign_group_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that was given back may be another's by then: the dead are buried after their group is killed."""
    unburied = []
    monkeypatch.setattr(child, "_kill_group", lambda pid: unburied.append(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)))
    assert child.run(("/bin/true",), 60.0).code == 0
    assert len(unburied) == 1


def test_a_disk_that_fills_up_in_the_middle_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.write_json(str(path), {"good": 1})

    def write() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            files.write_json(str(path), {"x": "y" * 5000})
        except OSError:
            return "refused"
        return "taken"

    assert child.start(write, "write").finish(5.0).out == "refused"
    assert files.read_json(str(path)) == {"good": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_what_was_kept_elsewhere_comes_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was drained while /var was read-only never came back: its drain was remembered in /run."""
    home, away = tmp_path / "var", tmp_path / "run"
    monkeypatch.setattr(world, "FALLBACK_STATE", str(away))
    home.write_text("no folder")
    folder, why = world.state_folder(str(home), "n1")
    assert (folder, bool(why)) == (str(away / "n1"), True)
    here = world.World("epilog", "n1", {}, folder, {"SLURM_JOB_ID": "9"}, 5.0)
    drain.remember(here, {"reason": "sr:filesystem-ro", "confirmed": True})
    marks.begin(here)
    files.append(here.path("ledger.jsonl"), '{"what": "drained"}')
    home.unlink()
    files.private_folder(files.private_folder(str(home)) + "/n1")
    files.append(str(home / "n1" / "ledger.jsonl"), '{"what": "before"}')
    files.write_json(str(home / "n1" / "drain.json"), {"reason": "older"})
    assert world.state_folder(str(home), "n1") == (str(home / "n1"), "")
    assert files.read_json(str(home / "n1" / "drain.json"))["reason"] == "sr:filesystem-ro"
    assert (home / "n1" / "epilogs" / "9.json").exists()
    assert (home / "n1" / "ledger.jsonl").read_text() == '{"what": "before"}\n{"what": "drained"}\n'
    assert not (away / "n1").exists()


# --- clocks ---


def test_a_node_with_a_wrong_clock_sees_no_empty_window(tmp_path: Path) -> None:
    """Its own clock is years ahead of slurmctld's, by which drains are dated."""
    ours = "sr:gpu t=1.000 node: x"
    line = "NodeName={} State=IDLE+DRAIN Partitions=p Reason={} [root@2020-01-01T00:00:0{}]\n"
    nodes = "".join(line.format(f"n{n}", ours if n == 3 else f"sr:xid{n} t=1.000 x", n) for n in (1, 2, 3))
    nodes += "".join(f"NodeName=m{n} State=IDLE Partitions=p\n" for n in range(97))
    said = tmp_path / "said"
    scontrol = tool(tmp_path / "scontrol")
    scontrol.write_text(f"#!{sys.executable}\nimport sys\nif 'nodes' in sys.argv: print({nodes!r})\n")
    said.touch()
    limits = {"max_nodes": 50, "max_percent": 50, "partition_max_percent": 50, "window_max_nodes": 2}
    here = world.World("epilog", "n3", {"slurm": {"scontrol": str(scontrol)}, "budget": limits}, str(tmp_path), {}, 10.0)
    drain.remember(here, {"reason": ours, "check": "gpu", "at": time.time(), "confirmed": False})
    assert drain.confirm(here).kind == "spent"


def test_returns_of_the_future_do_not_count_for_years(tmp_path: Path) -> None:
    here = world.World("healthcheck", "n1", {}, str(tmp_path), {}, 5.0)
    files.write_json(here.path(comeback.RETURNS), {"at": [time.time() + 1e8, time.time() - 10, time.time() - 1e8, "x"]})
    assert len(comeback._today(here)) == 1
    asked = time.monotonic()
    assert comeback.held_s({"at": time.time() + 1e6, "boot": "a"}, "b") >= asked - 1.0


def test_a_begin_that_somebody_wishes_is_left(tmp_path: Path) -> None:
    here = world.World("epilogslurmctld", "slurmctld", {"expedite": {"jobs": "all"}}, str(tmp_path), {}, 5.0)
    for ahead, wanted in ((121, True), (3600, False)):
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + ahead))
        assert expedite._wanted(here, {"Restarts": "1", "Comment": "", "Eligible": at}) is wanted


@pytest.mark.parametrize(
    ("state", "loses"),
    [
        ("DOWN+DRAIN+REBOOT_ISSUED", True),
        ("IDLE+DRAIN+POWERING_UP", False),
        ("IDLE+DRAIN+PLANNED", False),
        ("IDLE+DRAIN", False),
    ],
)
def test_only_a_reboot_of_slurms_own_loses_a_drain(state: str, loses: bool, tmp_path: Path) -> None:
    """Remembered in vain, it would be set again although an admin has taken it away."""
    line = f"NodeName=n1 State={state} Partitions=p Reason=ADMIN [bob@2026-01-01T00:00:01]\n"
    here = world.World(
        "healthcheck", "n1", {"slurm": {"scontrol": str(tool(tmp_path / "scontrol", line))}}, str(tmp_path), {}, 9.0
    )
    assert bool(periodic._drain_that_a_reboot_may_lose(here)) is loses


# --- configuration of every kind ---


@pytest.mark.parametrize(
    "text",
    [
        "checks: {gpu: {contexts: }}",
        "checks: {gpu: {contexts: prolog}}",
        "checks: {gpu: {contexts: 7}}",
        "checks: {gpu: {timeout_s: .inf}}",
        "checks: {gpu: {timeout_s: .nan}}",
        "checks: {gpu: {after_fails: 0.5}}",
        "checks: {gpu: {after_fails: .inf}}",
        "checks: {gpu: {nodes: [{match: n1, after_fails: .inf}]}}",
        "checks: {gpu: {nodes: [{match: n1, severity: drian}]}}",
        "checks: {gpu: {nodes: [7]}}",
        "budget: {max_nodes: .inf}",
        "budget: {max_percent: .nan}",
        "a: &a [*a]",
        "a: 2026-13-45",
        "checks: {gpu: !!python/object:os.system x}",
        "[" * 5000,
        "checks: {prüfung: {command: /x}}",
        "checks: {" + "a" * 60 + ": {command: /x}}",
        "checks: {disk: {command: /x}}",
        "checks: {manual: {command: /x}}",
        "1: 2",
        "checks: {gpu: {options: }}",
        "? [a, b]\n: c",
    ],
)
def test_nonsense_of_every_kind_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        configuration.compile_text(text)


def test_a_configuration_that_is_no_text_or_too_long_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "hooks.yaml"
    for data in (b"\xff\xfe\x00mode", b"# " + b"x" * (2 << 20)):
        path.write_bytes(data)
        with pytest.raises(ConfigError):
            configuration.read(path)


def test_a_slurm_conf_that_was_named_once_is_asked_again(places: Places, root_folder: Path) -> None:
    conf = root_folder / "slurm.conf"
    conf.write_text("NodeName=n[1-4] CPUs=8 RealMemory=100\n")
    configuration.compile_file(places.config, places.compiled, conf)
    assert configuration.compile_file(places.config, places.compiled)["promised"]["conf"] == str(conf)


@pytest.mark.parametrize(
    ("pattern", "node", "fits"),
    [
        ("n[1-200000]", "n150000", True),
        ("n[000001-200000]", "n150000", True),
        ("n[0001-9999]", "n123", False),
        ("n[1-3]x[7,9]", "n2x9", True),
        ("n[1-3]x[7,9]", "n2x8", False),
        ("a,n[1-3],b*", "bcd", True),
        ("n[1-12]", "n012", False),
        ("n1,n2", "", False),
    ],
)
def test_a_range_of_any_length_names_nodes(pattern: str, node: str, fits: bool) -> None:
    assert engine.matches(pattern, node) is fits


# --- trust ---


def test_trust_reads_links_as_the_kernel_does(root_folder: Path) -> None:
    """``dir/../x`` behind a link is beside the link's target, not beside the link."""
    there = root_folder / "there" / "deep"
    there.mkdir(parents=True)
    (root_folder / "dir").symlink_to(there)
    (root_folder / "there" / "x").write_text("run")
    (root_folder / "x").write_text("looked at")
    (root_folder / "link").symlink_to("dir/../x")
    assert files.distrust(str(root_folder / "link")) == ""
    (root_folder / "there" / "x").chmod(0o666)
    assert "written by others" in files.distrust(str(root_folder / "link"))
    (root_folder / "loop").symlink_to("loop")
    assert "too many links" in files.distrust(str(root_folder / "loop"))
    doubled = f"/{root_folder}//dir/../x"
    assert "written by others" in files.distrust(doubled)


# --- installing and removing ---


def test_a_chained_script_keeps_its_umask(places: Places) -> None:
    """A scratch folder that a site's prolog makes for the job was for root only."""
    entry = places.entry("prolog")
    theirs = tool(places.prefix / "theirs")
    theirs.write_text("#!/bin/sh\numask\n")
    entry.write_text(entry.read_text().replace("chained=''", f"chained='{theirs}'"))
    said = subprocess.run(["/bin/sh", "-c", f"umask 022; exec {entry}"], env=JOB, capture_output=True, text=True, check=True)
    assert said.stdout.strip().lstrip("0") == "22"


def test_some_hooks_installed_later_leave_what_is_known_of_the_others(places: Places, root_folder: Path) -> None:
    conf = root_folder / "slurm.conf"
    conf.write_text("Prolog=/site/prolog\nEpilog=/site/epilog\n")
    install.apply(install.plan(places, slurm_conf=conf), write_slurm_conf=True)
    install.apply(install.plan(places, slurm_conf=conf, kinds=("prolog",)), write_slurm_conf=True)
    install.uninstall(places, slurm_conf=conf)
    after = install.settings_of(conf)
    assert (after["Prolog"], after["Epilog"]) == ("/site/prolog", "/site/epilog")
    assert "EpilogSlurmctld" not in after


def test_what_slurm_still_calls_after_uninstalling_does_no_harm(places: Places, root_folder: Path) -> None:
    """slurmd keeps the Prolog that it knows until it is told; a missing one drains every node.  Tried on 22.05."""
    conf = root_folder / "slurm.conf"
    site = tool(root_folder / "site", code=4)
    conf.write_text(f"Prolog={site}\n")
    install.apply(install.plan(places, slurm_conf=conf), write_slurm_conf=True)
    install.uninstall(places)
    assert subprocess.run([str(places.entry("epilog"))], env=JOB, check=False).returncode == 0
    assert subprocess.run([str(places.entry("prolog"))], env=JOB, check=False).returncode == 4
    assert not places.library.exists()
    install.apply(install.plan(places, slurm_conf=conf))
    assert f"chained='{site}'" in places.entry("prolog").read_text(), "coming again, they know what was there before them"
    install.uninstall(places, slurm_conf=conf)
    assert install.settings_of(conf)["Prolog"] == str(site)
    install.uninstall(places, purge=True)
    assert not places.prefix.exists()


def test_files_of_an_earlier_release_go(places: Places) -> None:
    old = places.library / "checks" / "gpu" / "__init__.py"
    old.parent.mkdir()
    old.write_text("raise RuntimeError\n")
    install.apply(install.plan(places))
    assert not old.exists()
    assert install.apply(install.plan(places)) == []


def test_a_prolog_in_an_included_file_or_on_two_lines_is_not_lost(places: Places, root_folder: Path) -> None:
    conf, more = root_folder / "slurm.conf", root_folder / "more.conf"
    conf.write_text("Include more.conf\n")
    more.write_text("Prolog=own.sh\n")
    todo = install.plan(places, slurm_conf=conf)
    assert todo.before["Prolog"] == str(root_folder / "own.sh")
    with pytest.raises(ConfigError, match="includes"):
        install.apply(todo, write_slurm_conf=True)
    conf.write_text("Prolog=/a\nPrologFlags=Alloc\nProlog=/b\n")
    with pytest.raises(ConfigError, match="several lines"):
        install.apply(install.plan(places, slurm_conf=conf), write_slurm_conf=True)
    assert conf.read_text() == "Prolog=/a\nPrologFlags=Alloc\nProlog=/b\n"


def test_a_ledger_that_was_spoilt_is_told_as_far_as_it_is_whole(places: Places) -> None:
    lines = [
        '{"what": "drained", "at": "x"}',
        '{"what": "job_ended", "status": 1, "uid": [], "nodes": "x", "at": 9e9}',
        "[" * 5000,
    ]
    folder = state_of(places)
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "verdict.json").write_text('{"checks": {"gpu": 7, "cpu": {"status": "fail"}}}')
    where = ["--config", str(places.config), "--state", str(places.state), "--json"]
    for command in (["hooks", "status"], ["nodes", "lemons"]):
        said = subprocess.run([sys.executable, "-m", "slurm_resilience", *command, *where], capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert (said.returncode, said.stderr) == (0, "")
        assert "n1" in said.stdout
