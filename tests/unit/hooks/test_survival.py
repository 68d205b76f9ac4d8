"""Whatever is broken in or around our hooks: the exit code is 0, in time, and there is a record of it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_resilience.hooks
from slurm_resilience.hooks import ledger
from slurm_resilience.hooks.admin import configuration, entries, install
from slurm_resilience.hooks.admin.conformance import tool
from slurm_resilience.hooks.admin.entries import Places

SOURCE = Path(slurm_resilience.hooks.__file__).parent
NODE_FILES = sorted([*SOURCE.glob("*.py"), *SOURCE.glob("checks/*.py")])
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
OLD_PYTHONS = [
    path
    for version in ("3.6", "3.7", "3.8", "3.9")
    for path in [shutil.which(f"python{version}"), *map(str, PYENV.glob(f"{version}.*/bin/python"))]
    if path and "/shims/" not in path
]
JOB = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "77", "SLURM_JOB_UID": "65001", "SLURM_JOB_NUM_NODES": "1"}


@pytest.fixture
def root_folder() -> Iterator[Path]:
    """A folder that only root can write, all the way up: root trusts nothing under /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="srh-unit-", dir="/opt"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def places(root_folder: Path) -> Places:
    made = Places(root_folder / "prefix", root_folder / "hooks.yaml", root_folder / "state", install.python_of(None))
    made.config.write_text(
        f"hints: {{box: {root_folder}/hints}}\nmode: drain\nchecks: {{memory: {{options: {{real_memory_mb: 1}}}}}}\n"
    )
    made.config.chmod(0o644)
    install.apply(install.plan(made))
    return made


def call(
    places: Places, kind: str = "epilog", env: dict[str, str] | None = None, within_s: float = 60.0
) -> list[dict[str, object]]:
    """Run the entry as Slurm would; what was recorded.  Asserts the exit code 0 and the time."""
    started = time.monotonic()
    done = subprocess.run(
        [str(places.entry(kind))], env=JOB if env is None else env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < within_s
    assert len(done.stdout + done.stderr) < 1000
    return [entry for path in sorted(places.state.glob("*/ledger.jsonl")) for entry in ledger.entries(str(path))]


def errors(entries: list[dict[str, object]]) -> str:
    return " | ".join(str(entry.get("error")) for entry in entries if entry.get("what") == "own_error")


def reconfigure(places: Places, text: str) -> None:
    places.config.write_text(f"hints: {{box: {places.prefix}/hints}}\n{text}")
    configuration.compile_file(places.config, places.compiled)


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_healthy_node_is_passed_in_silence_and_without_a_slurm_command(kind: str, places: Places) -> None:
    spy = tool(places.prefix / "spy", code=1)
    spy.write_text(f"#!/bin/sh\ntouch {places.prefix}/called\n")
    reconfigure(
        places,
        f"slurm: {{scontrol: {spy}, squeue: {spy}, sacctmgr: {spy}}}\nmode: drain\nchecks: {{memory: {{}}, cpu: {{}}}}\n",
    )
    assert call(places, kind) == []
    assert not (places.prefix / "called").exists()
    told = json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]
    assert {name: entry["status"] for name, entry in told.items()} == {"memory": "ok", "cpu": "ok"}
    assert list((places.state / "n1").glob("epilogs/*")) == []


def test_missing_interpreter(places: Places) -> None:
    entry = places.entry("epilog")
    entry.write_text(entry.read_text().replace(f"python='{places.python}'", "python='/nonexistent/python3'"))
    assert "interpreter" in errors(call(places))


def test_an_interpreter_that_crashes_or_hangs(places: Places) -> None:
    entry = places.entry("epilog")
    text = entry.read_text().replace("deadline_s='10'", "deadline_s='1'")
    for made in (tool(places.prefix / "crash", code=139), tool(places.prefix / "hang", hangs=True)):
        entry.write_text(text.replace(f"python='{places.python}'", f"python='{made}'"))
        assert "ended with code" in errors(call(places, within_s=9.0))  # its time was 10 s


@pytest.mark.parametrize("broken", ["checks: [", "mode: drian", "", "\x00"])
def test_a_broken_configuration_does_nothing_and_says_so(broken: str, places: Places) -> None:
    places.config.write_text(broken)
    assert "was changed after it was compiled" in errors(call(places))
    assert not (places.state / "n1" / "verdict.json").exists()


@pytest.mark.parametrize("broken", ["{", "[]", '{"v": 99}', ""])
def test_a_broken_compiled_configuration(broken: str, places: Places) -> None:
    places.compiled.write_text(broken)
    assert "configuration" in errors(call(places))


def test_a_configuration_that_others_may_write_is_not_believed(places: Places) -> None:
    places.compiled.chmod(0o666)
    assert "can be written by others" in errors(call(places))


def test_no_configuration_at_all(places: Places) -> None:
    places.compiled.unlink()
    assert "configuration" in errors(call(places))


def test_our_own_code_is_broken(places: Places) -> None:
    (places.library / "engine.py").write_text("import nonexistent_module\n")
    assert "nonexistent_module" in errors(call(places))
    (places.library / "main.py").write_text("syntax error here\n")
    assert "ended with code 1" in errors(call(places))


@pytest.fixture
def job_without_state() -> Iterator[tuple[dict[str, str], Path]]:
    """The environment of a job on a node of this test's own, and where its record goes when the state takes none.

    That folder is the machine's: tests run beside each other and may not clear it from under one another.
    """
    node = f"n1-{os.getpid()}"
    fallback = Path("/run/slurm-resilience", node)
    shutil.rmtree(fallback, ignore_errors=True)
    yield {**JOB, "SLURMD_NODENAME": node}, fallback / "ledger.jsonl"
    shutil.rmtree(fallback, ignore_errors=True)


def test_state_on_a_full_disk(places: Places, job_without_state: tuple[dict[str, str], Path]) -> None:
    """The record goes to /run and to syslog; the checks are made all the same."""
    job, fallback = job_without_state
    shutil.rmtree(places.state)
    places.state.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "none", str(places.state)], check=False).returncode:
        pytest.skip("not run: may not mount here")
    try:
        (places.state / "full").write_bytes(b"x" * 4096)
        call(places, env=job)
        assert "state is elsewhere" in errors(ledger.entries(str(fallback)))
    finally:
        subprocess.run(["umount", str(places.state)], check=True)


def test_state_on_a_read_only_disk(places: Places, job_without_state: tuple[dict[str, str], Path]) -> None:
    job, fallback = job_without_state
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(places.state)], check=False).returncode:
        pytest.skip("not run: may not mount here")
    try:
        call(places, env=job)
        assert "state is elsewhere" in errors(ledger.entries(str(fallback)))
    finally:
        subprocess.run(["umount", str(places.state)], check=True)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURMD_NODENAME": "../../etc"},
        {"SLURMD_NODENAME": "n1\nn2", "SLURM_JOB_ID": "1"},
        {"SLURMD_NODENAME": "$(touch /tmp/srh-pwned)", "SLURM_JOB_ID": "`touch /tmp/srh-pwned`"},
    ],
)
def test_a_name_that_is_none_is_refused(env: dict[str, str], places: Places) -> None:
    """Our name is SLURMD_NODENAME and nothing else: the host's may be another node's (nhc#19)."""
    assert "SLURMD_NODENAME" in errors(call(places, env=env))
    assert [path.name for path in places.state.iterdir()] == ["unknown-node"]
    assert not Path("/tmp/srh-pwned").exists()


def test_what_a_job_says_is_nowhere_code(places: Places) -> None:
    """soperator, slurm-gcp: comments, names, paths and SPANK variables of a job change nothing and run nothing."""
    evil = "'; touch /tmp/srh-pwned; $(touch /tmp/srh-pwned) `touch /tmp/srh-pwned`\nSLURM_JOB_UID=0\n"
    hostile = {
        **JOB, "SLURM_JOB_COMMENT": evil + "skip_checks", "SLURM_JOB_WORK_DIR": evil, "SLURM_JOB_STDOUT": evil,
        "SLURM_JOB_NAME": "hc_x", "LD_PRELOAD": "/tmp/evil.so", "PYTHONPATH": "/tmp", "PYTHONSTARTUP": "/tmp/x",
        "ENV": "/tmp/x",
        "BASH_ENV": "/tmp/x",
        "IFS": "/", "SPANK_X": evil, "SLURM_JOB_PARTITION": evil, "SLURM_JOB_GPUS": evil,
        "SLURM_JOB_EXIT_CODE": evil,
    }  # fmt: skip
    call(places, env=hostile)
    assert not Path("/tmp/srh-pwned").exists()
    told = json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]
    assert told["memory"]["status"] == "ok", "the checks were made"
    assert "pwned" not in "".join(path.read_text() for path in places.state.rglob("*.json*"))


def test_zero_zero_is_no_evidence_and_a_code_is_written_down(places: Places) -> None:
    """A cancelled job and a requeued one end with 0:0, just as a good one does."""
    assert [e for e in call(places, env={**JOB, "SLURM_JOB_EXIT_CODE": "0"}) if e["what"] == "job_ended"] == []
    found = call(places, env={**JOB, "SLURM_JOB_EXIT_CODE": "768"})
    assert [entry["status"] for entry in found if entry["what"] == "job_ended"] == [768]


def test_a_check_that_hangs_costs_its_time_and_no_more(places: Places) -> None:
    hang = tool(places.prefix / "nvidia-smi", hangs=True)
    reconfigure(
        places, f"mode: drain\nchecks: {{gpu: {{timeout_s: 1, options: {{count: 4, nvidia_smi: {hang}}}}}, memory: {{}}}}\n"
    )
    call(places)
    told = json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]
    assert (told["gpu"]["status"], told["memory"]["status"]) == ("unknown", "ok")
    given = re.search(r"no answer within ([0-9.]+) s", told["gpu"]["text"])
    assert given is not None
    assert float(given[1]) <= 1.0
    assert told["gpu"]["fails"] == 0


def test_a_clock_that_jumps_is_recorded_and_nothing_else(places: Places) -> None:
    reconfigure(places, "mode: drain\nchecks: {clock: {}, memory: {contexts: [prolog, periodic, boot]}}\n")
    call(places, "healthcheck")
    memo = places.state / "n1" / "memo-clock.json"
    for jump in (-86400, 86400):
        told = json.loads(memo.read_text())
        memo.write_text(json.dumps({**told, "wall": told["wall"] + jump}))
        found = call(places, "healthcheck")
        last = [entry for entry in found if entry["what"] == "check" and entry["check"] == "clock"][-1]
        assert (last["status"], last["word"]) == ("warn", "jump")
        assert {entry["what"] for entry in found} <= {"check", "no_answer"}
        call(places, "healthcheck")
    before = json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]["memory"]["steady"]
    call(places, "prolog")
    assert json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]["memory"]["steady"] == before, "still fresh"


def test_a_check_that_crashes_or_hangs_takes_no_other_with_it(places: Places) -> None:
    """The quick checks share a child; one that never answers is unknown, the others are what they are."""
    text = "mode: drain\nchecks: {cpu: {timeout_s: 1}, memory: {}, memory_errors: {}, leftovers: {}}\n"
    reconfigure(places, text)
    for harm in ("import time; time.sleep(3600)", "import os; os._exit(9)", "raise RuntimeError('boom')"):
        (places.library / "checks" / "cpu.py").write_text(f"{harm}\n")
        call(places)
        told = json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]
        assert {name: entry["status"] for name, entry in told.items()} == {
            "cpu": "unknown", "memory": "ok", "memory_errors": "ok", "leftovers": "ok",
        }  # fmt: skip
        (places.state / "n1" / "verdict.json").unlink()


@pytest.mark.parametrize("says", ["", "x" * 100_000])
def test_a_controller_that_hangs_delays_by_one_bounded_call_and_the_verdict_is_kept(says: str, places: Places) -> None:
    """nhc#161: no drain is blamed on the check, the call is bounded, the verdict waits."""
    dead = tool(places.prefix / "scontrol", says, hangs=True)
    text = "slurm: {{scontrol: {0}, call_s: 1}}\nmode: drain\nchecks: {{memory: {{options: {{real_memory_mb: 100000000}}}}}}\n"
    reconfigure(places, text.format(dead))
    found = call(places)
    assert [entry["decision"] for entry in found if entry["what"] == "not_drained"] == ["pending"]
    kept = json.loads((places.state / "n1" / "pending.json").read_text())
    assert (kept["check"], kept["status"]) == ("memory", "fail")


def test_observe_is_the_default_and_only_records(places: Places) -> None:
    spy = places.prefix / "spy"
    spy.write_text(f"#!/bin/sh\ntouch {places.prefix}/called\n")
    spy.chmod(0o755)
    reconfigure(places, f"slurm: {{scontrol: {spy}}}\nchecks: {{memory: {{options: {{real_memory_mb: 100000000}}}}}}\n")
    assert [entry["what"] for entry in call(places)] == ["check", "would_drain"]
    assert not (places.prefix / "called").exists()


def test_an_epilog_that_was_killed_is_made_up_for(places: Places) -> None:
    """slurmd killed in mid-epilog reports success to Slurm; our own mark does not."""
    folder = places.state / "n1" / "epilogs"
    folder.mkdir(parents=True, mode=0o700)
    (places.state / "n1").chmod(0o700)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    (folder / "12.json").write_text(
        json.dumps({"job": "12", "uid": 2001, "boot": boot, "pid": 2**22 - 1, "start": "1", "at": 1})
    )
    reconfigure(places, "mode: observe\nchecks: {memory: {options: {real_memory_mb: 100000000}}}\n")
    found = call(places, "prolog")
    assert "epilog_made_up" in [entry["what"] for entry in found]
    assert "would_drain" in [entry["what"] for entry in found]
    assert list(folder.iterdir()) == []


def test_the_prolog_believes_the_periodic_check_while_it_is_fresh(places: Places) -> None:
    reconfigure(places, "mode: observe\nchecks: {memory: {contexts: [prolog, periodic, boot]}}\n")
    call(places, "healthcheck")
    verdict = places.state / "n1" / "verdict.json"
    told = json.loads(verdict.read_text())
    told["checks"]["memory"]["text"] = "said earlier"
    verdict.write_text(json.dumps(told))
    call(places, "prolog")
    assert json.loads(verdict.read_text())["checks"]["memory"]["text"] == "said earlier"
    told["checks"]["memory"]["steady"] -= 3600
    verdict.write_text(json.dumps(told))
    call(places, "prolog")
    assert json.loads(verdict.read_text())["checks"]["memory"]["text"] != "said earlier"
    told = json.loads(verdict.read_text())
    told["checks"]["memory"]["text"] = "said before the reboot"
    verdict.write_text(json.dumps({**told, "boot": "another"}))
    call(places, "prolog")
    assert json.loads(verdict.read_text())["checks"]["memory"]["text"] != "said before the reboot", "nobody inherits a verdict"


def test_a_chained_script_runs_and_its_code_is_passed_on(places: Places) -> None:
    entry = places.entry("prolog")
    theirs = tool(places.prefix / "theirs", code=3)
    entry.write_text(entry.read_text().replace("chained=''", f"chained='{theirs}'"))
    assert subprocess.run([str(entry)], env=JOB, check=False).returncode == 3


# --- which Pythons ---


def test_the_nodes_files_need_no_more_than_python_3_6() -> None:
    """Grammar of 3.6, the standard library alone, relative imports, and none of the newer calls unasked."""
    newer = re.compile(
        r"removeprefix|removesuffix|capture_output|missing_ok|dataclass|from __future__ import annotations|time_ns\("
        r"|fromisoformat|posix_spawn|waitstatus_to_exitcode|CLOCK_BOOTTIME|scandir\(\w*fd|:= |zip\(.*strict|import typing\b"
    )
    words = "binascii calendar collections fcntl itertools json os re resource select signal stat sys syslog time traceback"
    allowed = set(words.split())
    for path in NODE_FILES:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, feature_version=(3, 6))
        assert newer.findall(text) == [], path
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] in allowed, path


@pytest.mark.parametrize("python", [sys.executable, *OLD_PYTHONS])
def test_every_file_loads_and_the_epilog_runs_on_this_python_and_older_ones(python: str, places: Places) -> None:
    names = [path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".") for path in NODE_FILES]
    code = "import sys, importlib; sys.path.insert(0, sys.argv[1]); [importlib.import_module(m) for m in sys.argv[2:]]"
    modules = [f"{entries.PACKAGE}.{name}" for name in names if not name.endswith(("__init__", "start"))]
    subprocess.run([python, "-I", "-S", "-c", code, str(places.library.parent), *modules], check=True, timeout=120)
    entry = places.entry("epilog")
    entry.write_text(entry.read_text().replace(f"python='{places.python}'", f"python='{python}'"))
    text = "checks: {memory: {}, cpu: {}, filesystem: {options: {paths: [/]}}, oom: {}, leftovers: {}, tmpfiles: {}, xid: {}}\n"
    reconfigure(places, text)
    assert errors(call(places)) == ""
    told = json.loads((places.state / "n1" / "verdict.json").read_text())["checks"]
    assert {entry["status"] for name, entry in told.items() if name not in ("oom", "xid")} == {"ok"}


def test_an_isolated_python_takes_nothing_from_the_folder_it_is_in(places: Places, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    done = subprocess.run(
        [str(places.python), "-I", "-S", str(places.library / "start.py"), "epilog", str(places.compiled), str(places.state)],
        cwd=tmp_path, env=JOB, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert sys.version_info >= (3, 10)
    assert os.listdir(places.state / "n1")
