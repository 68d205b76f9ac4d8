"""Faults by name: what is refused, before anything is touched."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.sandbox import faults
from slurm_resilience.sandbox.disks import size_bytes
from slurm_resilience.sandbox.layout import Layout
from slurm_resilience.sandbox.process_faults import _is_agent, _is_launcher, _is_supervisor


@dataclass
class Nowhere:
    """Just enough of a sandbox to be asked for its names: whatever is refused needs no more."""

    layout: Layout = field(default_factory=lambda: Layout("nowhere"))
    nodes: list[str] = field(default_factory=lambda: ["n1", "n2", "n10"])


@pytest.mark.parametrize(
    ("name", "targets", "options", "words"),
    [
        ("power-of", ["n1"], {}, "did you mean 'power-off'"),
        ("power-off", [], {}, "needs the names of nodes: n1, n2, n10"),
        ("power-off", ["n11"], {}, "did you mean 'n1"),
        ("power-off", ["n[1"], {}, "does not name nodes"),
        ("power-on", ["n1"], {"sameboot": True}, "did you mean 'same_boot'"),
        ("power-off", ["n1"], {"same_boot": True}, "it has none"),
        ("kill-controller", ["n1"], {}, "takes no node names"),
        ("fill-disk", ["a", "b"], {}, "takes one path"),
        ("fill-disk", [], {}, "Name the PATH"),
        ("preempt", [], {"nodes": 9}, "the sandbox has 3 nodes"),
        ("break-scontrol", [], {"how": "hung"}, "did you mean 'hang'"),
        ("break-scontrol", [], {"command": "scontro"}, "did you mean 'scontrol'"),
    ],
)
def test_nonsense_is_refused_with_the_nearest_sense(
    name: str, targets: list[str], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        faults.inject(Nowhere(), name, targets, options)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_nodes_are_named_as_slurm_names_them() -> None:
    nowhere = Nowhere()
    for words in (["n10", "n1"], ["n1,n10"], ["n[1,10]"], ["n1", "n10", "n1"]):
        assert faults._nodes(nowhere, "cut", words) == ["n1", "n10"]  # type: ignore[arg-type]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    faults.configure(parser)
    return parser.parse_args(words)


def test_the_command_line_says_the_same_as_python() -> None:
    args = parsed("power-on", "n1", "n2", "--same-boot")
    assert (args.fault, faults.nodes_of(args), faults.options_of(args)) == ("power-on", ["n1", "n2"], {"same_boot": True})
    args = parsed("preempt", "--nodes", "2", "--seconds", "1.5")
    assert faults.options_of(args) == {"nodes": 2, "seconds": 1.5, "wait": False, "within": 120.0}
    args = parsed("fill-disk", "/x", "--leave", "1K")
    assert (faults.nodes_of(args), faults.options_of(args)["leave"]) == (["/x"], "1K")


def test_every_fault_has_help_and_fresh_defaults() -> None:
    for name, fault in faults.FAULTS.items():
        targets = {"nodes": ["n1"], "path": ["/x"], "": []}[fault.targets]
        assert fault.help
        assert faults.options_of(parsed(name, *targets)) == {option.key: option.default for option in fault.options}


@pytest.mark.parametrize(("text", "value"), [("4096", 4096), ("4K", 4096), ("2m", 2 << 20), ("1G", 1 << 30)])
def test_sizes(text: str, value: int) -> None:
    assert size_bytes(text) == value


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5M", "4T", "0", "4 M"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        size_bytes(text)


def test_who_is_who_by_its_command_line() -> None:
    agent = ["/venv/bin/python", "-m", "slurm_resilience.runtime.agent", "--run-dir", "/r", "--node", "n1"]
    assert _is_agent(agent)
    assert not _is_agent(["srun", "-N1", *agent])
    assert not _is_agent(["/bin/bash", "-c", " ".join(agent)])
    launcher = ["/usr/bin/python3", "-u", "/site/slurm_resilience/runtime/launcher.py", "serve", "17"]
    assert _is_launcher(launcher)
    assert not _is_launcher([*launcher[:3], "rank"])
    assert not _is_launcher(["vim", "launcher.py"])
    for supervisor in (
        ["/venv/bin/python", "/venv/bin/slurm-resilience", "run", "--", "python", "train.py"],
        ["python3", "-m", "slurm_resilience", "run", "--run-dir", "/r"],
    ):
        assert _is_supervisor(supervisor)
    assert not _is_supervisor(["/bin/bash", "-c", "slurm-resilience run -- x"])
    assert not _is_supervisor(["python3", "-m", "slurm_resilience", "sandbox", "run"])
    assert not _is_supervisor(["python", "/venv/bin/slurm-resilience", "submit", "--", "run"])
    assert not _is_supervisor(agent)
