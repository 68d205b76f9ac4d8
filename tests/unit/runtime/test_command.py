"""Which command lines are Python programs that can be forked, and what do they run?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_resilience.runtime.command import PythonCommand, find_program, launcher_command, parse_python, same_interpreter


@pytest.mark.parametrize(
    ("line", "flags", "form", "target", "args"),
    [
        ("python train.py", (), "script", "train.py", ()),
        ("/opt/x/bin/python3.11 train.py -m x --", (), "script", "train.py", ("-m", "x", "--")),
        ("python3 -u -O train.py -u", ("-u", "-O"), "script", "train.py", ("-u",)),
        ("python -uOB train.py", ("-uOB",), "script", "train.py", ()),
        ("python -X dev -W error -Xutf8 t.py", ("-X", "dev", "-W", "error", "-X", "utf8"), "script", "t.py", ()),
        ("python -m pkg.tool -m y", (), "module", "pkg.tool", ("-m", "y")),
        ("python -mpkg", (), "module", "pkg", ()),
        ("python -um pkg a", ("-u",), "module", "pkg", ("a",)),
        ("python -Bc code a", ("-B",), "code", "code", ("a",)),
        ("python -- -odd.py a", (), "script", "-odd.py", ("a",)),
        ("python --check-hash-based-pycs always t.py", ("--check-hash-based-pycs", "always"), "script", "t.py", ()),
    ],
)  # fmt: skip
def test_python_programs(line: str, flags: tuple[str, ...], form: str, target: str, args: tuple[str, ...]) -> None:
    words = line.split()
    assert parse_python(words) == PythonCommand(words[0], flags, form, target, args)


@pytest.mark.parametrize("line", [
    "", "bash train.sh", "python", "python -", "python -i t.py", "python -V", "python --version", "python --help", "python -u",
    "python -m", "python -c", "python -W", "python -Z t.py", "python --", "torchrun t.py", "python-config x", "ipython t.py",
])  # fmt: skip
def test_what_is_started_as_it_is(line: str) -> None:
    assert parse_python(line.split()) is None


def test_only_the_same_interpreter_with_the_same_flags_can_be_forked() -> None:
    one = parse_python(["python", "-u", "a.py"])
    assert same_interpreter(one, parse_python(["python", "-u", "-m", "b", "x"]))
    assert not same_interpreter(one, parse_python(["python", "a.py"]))
    assert not same_interpreter(one, parse_python(["python3", "-u", "a.py"]))
    assert not same_interpreter(None, None)


def test_what_starts_a_launcher_and_why_none_is_started(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    path = {"PATH": str(tmp_path)}
    words = ["python3", "-u", "t.py"]
    assert launcher_command(words, wrap=[], warm=True, environment=path) == ([str(tmp_path / "python3"), "-u"], "")
    wrapped = launcher_command(words, wrap=["apptainer", "exec", "x.sif"], warm=True, environment={"PATH": "/nowhere"})
    assert wrapped == (["apptainer", "exec", "x.sif", "python3", "-u"], "")  # its PATH is not ours
    for argv, warm, why in (
        (words, False, "warm = false"),
        (["bash", "x"], True, "'bash' is not a Python command"),
        (["python9"], True, "not a Python"),
        (["python9", "t.py"], True, "no 'python9' on the agent's PATH"),
    ):
        command, reason = launcher_command(argv, wrap=[], warm=warm, environment=path)
        assert command is None
        assert why in reason


def test_programs_are_found_by_the_path_of_the_given_environment(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    assert find_program("python", {"PATH": f"/nowhere:{tmp_path}"}) == str(tmp_path / "python")
    assert find_program("python", {"PATH": "/nowhere"}) is None
    assert find_program(sys.executable, {"PATH": "/nowhere"}) == sys.executable
