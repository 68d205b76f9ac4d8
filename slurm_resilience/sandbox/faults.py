"""The faults by name: what each takes, and one way to make any of them happen.

A fault returns only when it has really happened, and raises :class:`SandboxError` when it could not: a test that
injected nothing would prove nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import ConfigError, nearest
from slurm_resilience.sandbox import command_faults, job_faults, node_faults, process_faults, service_faults

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox

Options = dict[str, Any]
Run = Callable[["Sandbox", list[str], Options], dict[str, Any]]


@dataclass(frozen=True)
class Option:
    """One option: its name on the command line, and what argparse needs to know."""

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Fault:
    """One fault.  ``targets`` says what the words after its name are: "nodes", "path", or none."""

    help: str
    run: Run
    targets: str = ""
    options: tuple[Option, ...] = field(default=())


_OFF = Option("off", "undo it", default=False)
_WHICH_RANK = (
    Option("job", "only ranks of this job"),
    Option("node", "only ranks on this node"),
    Option("index", "the rank's number (default: the lowest that is found)", type=int),
)
_WHICH_PROCESS = (Option("job", "only of this job"), Option("node", "only on this node"))

FAULTS: dict[str, Fault] = {
    "power-off": Fault("cut the power: silent, no FIN or RST gets out", node_faults.power_off, "nodes"),
    "power-on": Fault("switch on again, with a new boot time and boot id", node_faults.power_on, "nodes",
                      (Option("same-boot", "as if it had never been off", default=False),)),
    "cut": Fault("pull the network cable", node_faults.cut, "nodes"),
    "heal": Fault("plug the network cable in again", node_faults.heal, "nodes"),
    "freeze": Fault("stop everything on the node, as a paused machine", node_faults.freeze, "nodes"),
    "thaw": Fault("let a frozen node go on", node_faults.thaw, "nodes"),
    "drain": Fault("have an admin drain it", node_faults.drain, "nodes",
                   (Option("reason", "why", default="sandbox: drained on demand"),)),
    "resume": Fault("have an admin return it to service", node_faults.resume, "nodes"),
    "kill-slurmd": Fault("kill slurmd alone; its jobs' processes live on", node_faults.kill_slurmd, "nodes"),
    "restart-slurmd": Fault("start slurmd again", node_faults.restart_slurmd, "nodes"),
    "fail-prolog": Fault("make Prolog fail there, until --off", node_faults.fail_prolog, "nodes", (_OFF,)),
    "fail-epilog": Fault("make Epilog fail there, until --off", node_faults.fail_epilog, "nodes", (_OFF,)),
    "kill-rank": Fault("kill -9 a rank", process_faults.kill_rank, "", _WHICH_RANK),
    "hang-rank": Fault("stop a rank (SIGSTOP)", process_faults.hang_rank, "", _WHICH_RANK),
    "kill-launcher": Fault("kill -9 a launcher", process_faults.kill_launcher, "", _WHICH_PROCESS),
    "kill-agent": Fault("kill -9 an agent", process_faults.kill_agent, "", _WHICH_PROCESS),
    "kill-supervisor": Fault("kill -9 a supervisor", process_faults.kill_supervisor, "", _WHICH_PROCESS),
    "preempt": Fault("submit a job to the partition high that takes nodes from running jobs", job_faults.preempt, "", (
        Option("nodes", "how many nodes it takes (default: all)", type=int),
        Option("seconds", "how long it runs", default=30.0, type=float),
        Option("wait", "return only when it has ended", default=False),
        Option("within", "longest wait for the preemption", default=120.0, type=float),
    )),
    "kill-controller": Fault("kill -9 slurmctld", service_faults.kill_controller),
    "restart-controller": Fault("start slurmctld with the state that it saved", service_faults.restart_controller),
    "break-scontrol": Fault("make scontrol (or another command) unusable on nodes and login, until --off",
                            command_faults.break_command, "", (
        Option("how", "what it does instead", default="hang", choices=("hang", "fail", "missing")),
        Option("command", "which of Slurm's commands", default="scontrol"),
        _OFF,
    )),
    "small-disk": Fault("mount a small disk at PATH (a new or empty folder) on every host", command_faults.small_disk, "path", (
        Option("size", "how big", default="64M"),
        _OFF,
    )),
    "fill-disk": Fault("fill the small disk at PATH (made first when there is none)", command_faults.fill_disk, "path", (
        Option("size", "how big, when it is made now", default="64M"),
        Option("leave", "how much stays free", default="0"),
        _OFF,
    )),
}  # fmt: skip


def inject(sandbox: Sandbox, name: str, targets: list[str], options: Options) -> dict[str, Any]:
    """Make the fault happen.  Raises :class:`ConfigError` for what it does not know, :class:`SandboxError` when it cannot."""
    fault = FAULTS.get(name)
    if fault is None:
        raise ConfigError(f"There is no fault {name!r}: {nearest(name, FAULTS)}")
    known = {option.key: option for option in fault.options}
    for key in options:
        if key not in known:
            raise ConfigError(f"{name} has no option {key!r}: {nearest(key, known) if known else 'it has none'}")
    if fault.targets == "nodes":
        targets = _nodes(sandbox, name, targets)
    elif fault.targets == "path" and len(targets) > 1:
        raise ConfigError(f"{name} takes one path, not {len(targets)}")
    elif not fault.targets and targets:
        raise ConfigError(f"{name} takes no node names, but got {' '.join(targets)}")
    values = {key: options.get(key, option.default) for key, option in known.items()}
    began = time.monotonic()
    detail = fault.run(sandbox, targets, values)
    happened: dict[str, Any] = {"fault": name, "sandbox": sandbox.layout.name, "at": time.time()}
    if fault.targets == "nodes":
        happened["nodes"] = targets
    return {**happened, "took_s": round(time.monotonic() - began, 3), **detail}


def _nodes(sandbox: Sandbox, name: str, words: list[str]) -> list[str]:
    """``n1 n3``, ``n1,n3`` or ``n[1-2]`` as names that exist."""
    from ClusterShell.NodeSet import NodeSet, NodeSetParseError

    if not words:
        raise ConfigError(f"{name} needs the names of nodes: {', '.join(sandbox.nodes)}")
    try:
        named = list(NodeSet(",".join(words)))
    except NodeSetParseError as error:
        raise ConfigError(f"{' '.join(words)!r} does not name nodes", evidence=str(error)) from None
    for word in named:
        if word not in sandbox.nodes:
            raise ConfigError(f"The sandbox {sandbox.layout.name} has no node {word!r}: {nearest(word, sandbox.nodes)}")
    return sorted(named, key=lambda word: int(word[1:]))


def heal(sandbox: Sandbox) -> None:
    """Undo every fault: daemons, commands, disks, nodes, jobs, drains, in this order."""
    service_faults.heal(sandbox)
    command_faults.heal(sandbox)
    booted = node_faults.switch_all_on(sandbox)
    job_faults.cancel_all(sandbox)
    node_faults.return_all(sandbox, booted)


# --- the command line ---


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare `fault NAME …`: one parser a fault, so that --help of a fault shows what it takes."""
    names = parser.add_subparsers(dest="fault", metavar="FAULT", required=True)
    for name, fault in FAULTS.items():
        leaf = names.add_parser(name, help=fault.help, description=fault.help, allow_abbrev=False)
        leaf.add_argument("--name", default=argparse.SUPPRESS, help="which sandbox (default: default)")
        leaf.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")
        if fault.targets == "nodes":
            leaf.add_argument("targets", nargs="+", metavar="NODE")
        elif fault.targets == "path":
            leaf.add_argument("targets", nargs="?", metavar="PATH")
        for option in fault.options:
            flag = f"--{option.name}"
            key = f"option_{option.key}"
            if option.default is False:
                leaf.add_argument(flag, action="store_true", dest=key, help=option.help)
            else:
                shown = f" (default: {option.default})" if option.default is not None else ""
                leaf.add_argument(flag, dest=key, default=option.default, type=option.type or str, choices=option.choices,
                                  help=option.help + shown)  # fmt: skip


def nodes_of(args: argparse.Namespace) -> list[str]:
    """The words after the fault's name."""
    targets = getattr(args, "targets", None) or []
    return [targets] if isinstance(targets, str) else list(targets)


def options_of(args: argparse.Namespace) -> Options:
    """The options given, by name."""
    prefix = "option_"
    return {key.removeprefix(prefix): value for key, value in vars(args).items() if key.startswith(prefix)}


def sentence(happened: dict[str, Any]) -> str:
    """One line for people."""
    hidden = ("fault", "sandbox", "at", "nodes", "took_s")
    moment = time.strftime("%H:%M:%S", time.localtime(happened["at"]))
    words = [moment, str(happened["fault"]), *happened.get("nodes", [])]
    words += [f"{key}={value}" for key, value in happened.items() if key not in hidden and value not in (None, [], "")]
    return " ".join(words) + f" ({happened['took_s']:.2f} s)"
