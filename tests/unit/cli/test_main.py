"""The one choke point: every outcome of a command becomes a documented exit code and at most one paragraph."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import pytest

from slurm_resilience import __version__, cli
from slurm_resilience.cli.submit import _findable
from slurm_resilience.errors import ConfigError, ExitCode
from slurm_resilience.submit import folders


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command `probe` whose execute() a test replaces."""
    module = types.ModuleType("probe_command", "Probe the choke point.")

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--nodes", type=int, default=1)

    module.configure = configure  # type: ignore[attr-defined]
    module.execute = lambda args: args.nodes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "probe"))
    return module


@pytest.mark.usefixtures("command")
def test_a_command_s_code_is_returned_unflattened() -> None:
    assert cli.main(["probe", "--nodes", "83"]) == 83


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"  {name} " not in shown] == []
    assert cli.main([]) == ExitCode.USAGE
    capsys.readouterr()
    assert cli.main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"slurm-resilience {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evnets"]) == ExitCode.USAGE
    out = capsys.readouterr()
    assert "did you mean 'events'" in out.err
    assert out.out == ""


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("words", [["--node=2"], ["--nodez", "2"]])
def test_an_unknown_option_names_the_nearest_and_is_never_abbreviated(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["probe", *words])
    assert end.value.code == ExitCode.USAGE
    assert "did you mean '--nodes'" in capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_a_bad_value_is_usage_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["probe", "--nodes", "two"])
    assert end.value.code == ExitCode.USAGE
    assert "invalid int value: 'two'" in capsys.readouterr().err


def test_our_errors_are_one_paragraph_on_stderr(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def execute(args: argparse.Namespace) -> int:
        raise ConfigError("nodes=(4, 2) is upside down", evidence="4 > 2", remedy="write (2, 4)")

    command.execute = execute  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == ExitCode.CONFIG_ERROR
    out = capsys.readouterr()
    assert out.err == "slurm-resilience probe: nodes=(4, 2) is upside down. How we know: 4 > 2. What to do: write (2, 4).\n"
    assert out.out == ""


def test_a_bug_of_ours_is_not_dressed_up(command: types.ModuleType) -> None:
    def execute(args: argparse.Namespace) -> int:
        raise KeyError("bug")

    command.execute = execute  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        cli.main(["probe"])


def test_interrupt_is_130(command: types.ModuleType) -> None:
    def execute(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.execute = execute  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130


def test_a_place_that_may_not_be_looked_at_is_an_error_and_no_traceback(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(args: argparse.Namespace) -> int:
        raise PermissionError(13, "Permission denied", "/root/nope")

    command.execute = execute  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == ExitCode.CONFIG_ERROR
    assert capsys.readouterr().err.startswith("slurm-resilience probe: You may not use /root/nope.")


def test_an_option_that_is_like_no_other_is_not_guessed_and_a_guess_is_not_buried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word, hint in (("--bogus", ""), ("--foldr", "did you mean '--folder'?")):
        with pytest.raises(SystemExit):
            cli.main(["submit", word, "x", "--", "python"])
        first, *_ = capsys.readouterr().err.splitlines()
        assert first == f"slurm-resilience submit: unknown option {word!r}" + (f": {hint}" if hint else "")


@pytest.mark.parametrize(
    ("words", "instead"),
    [(["--signal=USR1@30"], "--signal-delay-s"), (["--no-requeue"], "--set requeue=false"), (["-a", "1-4"], "map_resilient"),
     (["--ntasks", "4"], "--ranks-per-node"), (["-o", "x.log"], "slurm-resilience logs")],
)  # fmt: skip
def test_what_of_sbatch_is_not_taken_is_named_with_what_to_take_instead(
    words: list[str], instead: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", "--nodes", "2", *words, "--", sys.executable, "-c", "0"]) == ExitCode.CONFIG_ERROR
    *notes, said = capsys.readouterr().err.splitlines()
    assert instead in said
    assert "unknown option" not in said
    assert all(line.startswith("slurm-resilience submit: note: ") for line in notes if not line.startswith("$x")), notes
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_done_to_a_sandbox_is_no_fault_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sandbox", "exec", "--name", "nosuch", "--", "true"]) == ExitCode.CONFIG_ERROR
    assert "not up" in (said := capsys.readouterr().err) or "needs root" in said


def test_a_script_that_is_not_there_is_not_queued(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    # wherever this checkout lies: /tmp alone is a place that each machine has of its own
    monkeypatch.setattr(folders, "_USUALLY_LOCAL", (Path("/tmp/only"),))
    monkeypatch.setattr(folders, "_NODE_LOCAL", ())
    monkeypatch.chdir(here)
    for words in ([str(here / "nope.py")], ["nope.py"], ["-u", "./nope.py"]):
        assert cli.main(["submit", "--dry-run", "--", sys.executable, *words]) == ExitCode.CONFIG_ERROR
        assert "There is no script" in capsys.readouterr().err
    there = [[str(here / "no-such-folder" / "x.py")], ["/tmp/only/on-the-node.py"], [Path(__file__).name], ["-m", "nope"]]
    for words in there:
        assert _findable([sys.executable, *words], wrapped=False) == (sys.executable, *words)
    assert _findable([sys.executable, "nope.py"], wrapped=True)
    assert _findable([sys.executable, Path(__file__).name], wrapped=False, chdir=str(here))
