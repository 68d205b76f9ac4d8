"""What Slurm says about this job: asked once when an allocation begins, and kept for whoever supervises it later.

A supervisor that takes over on another node finds all it needs in ``RUN_DIR/allocation.json``, and asks Slurm nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience._atomic import read_json, write_json_atomic
from slurm_resilience.errors import ExitCode, FormatError, SlurmError
from slurm_resilience.runtime.backend_slurm import SlurmBackend
from slurm_resilience.runtime.errands import BY_EXIT_CODE, Errands
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.spec import RunSpec
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.environment import SlurmEnvironment
from slurm_resilience.slurm.failures import CommandMissing
from slurm_resilience.slurm.timeleft import DEFAULT_KILL_WAIT_S, kill_wait_s

LEAD_VARIABLE = "RESILIENCE_SIGNAL_LEAD_S"
# Set by the shipped script where it has a scontrol: the file whose presence tells it to put the job back.
WISH_VARIABLE = "RESILIENCE_REQUEUE_WISH"
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
FILE_NAME = "allocation.json"
VERSION = 1


@dataclass
class Surroundings:
    """The job and its cluster; defaults where Slurm cannot be asked, since ranks can run without it.

    ``addresses``: where each node of the job is reached, its name where nothing else is known.
    """

    nodes: tuple[str, ...] = ()
    job_id: str = ""
    raw_job_id: str = ""
    restart: int = 0
    addresses: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    kill_wait_s: float = DEFAULT_KILL_WAIT_S
    can_requeue: bool = True
    started_at: float | None = None
    gpus: dict[str, int] = field(default_factory=dict)
    lead_s: float = 0.0
    problem: str = ""
    requeue_wish: str = ""

    @classmethod
    def of(cls, here: SlurmEnvironment) -> Surroundings:
        """Ask; a few quick questions, before anything has started."""
        client = CommandClient()
        found = cls(here.nodes, here.job_id, here.raw_job_id, here.restart_count, {name: name for name in here.nodes})
        found.lead_s = float(os.environ.get(LEAD_VARIABLE) or 0.0)
        try:
            found.settings = client.config()
            found.kill_wait_s = kill_wait_s(found.settings)
            record = client.job(here.job_id)
            found.can_requeue = record.fields.get("BatchFlag", "1") != "0"
            found.started_at = record.start_at
            found.gpus = {name: count for name, count in client.gpus(here.job_id).items() if name in here.nodes}
            known = client.nodes(here.nodes)
            found.addresses |= {name: node.fields.get("NodeAddr", name) for name, node in known.items()}
        except CommandMissing as error:
            found.requeue_wish = os.environ.get(WISH_VARIABLE, "") or (BY_EXIT_CODE if _requeued_by_exit_code() else "")
            found.can_requeue = bool(found.requeue_wish)
            found.problem = _without_scontrol(error, found.requeue_wish)
        except SlurmError as error:
            found.problem = f"Slurm could not be asked about this job; going on with defaults. {error}"
        return found

    @property
    def script_requeues(self) -> bool:
        """Slurm cannot be asked for anything here, but the batch script can do it for us."""
        return bool(self.requeue_wish)

    def others(self, node: str) -> list[str]:
        """Addresses of the nodes besides this one."""
        return [address for name, address in self.addresses.items() if name != node]

    def backend(self, folder: RunFolder) -> SlurmBackend:
        """What starts agents on the nodes of this job."""
        binds = "affinity" in self.settings.get("TaskPlugin", "affinity")
        return SlurmBackend(folder, self.raw_job_id, self.nodes, binds=binds, gpus=self.gpus)

    def errands(self, run_id: str, run_dir: Path) -> Callable[[Callable[[Any], None]], Errands]:
        """The thread that will talk to Slurm, made when it is known who hears the answers."""

        def make(answer: Callable[[Any], None]) -> Errands:
            return Errands(
                CommandClient(), job_id=self.job_id, restart=self.restart, nodes=self.nodes, run_id=run_id,
                lead_s=self.lead_s, config=self.settings, answer=answer, run_dir=run_dir,
                requeue_wish=self.requeue_wish,
            )  # fmt: skip

        return make

    def keep(self, run_dir: Path, spec: RunSpec) -> None:
        """Write all of it down for a supervisor on another node.  Raises OSError."""
        plain = dataclasses.asdict(self)
        write_json_atomic(run_dir / FILE_NAME, {"v": VERSION, "surroundings": plain, "spec": dataclasses.asdict(spec)})

    @classmethod
    def kept(cls, run_dir: Path) -> tuple[Surroundings, RunSpec]:
        """What was written down.  Raises :class:`FormatError` when it is not there, or not ours to read."""
        path = run_dir / FILE_NAME
        try:
            raw = read_json(path)
            if raw is None or raw["v"] > VERSION:
                raise FormatError(f"{path} does not say what the job is like", evidence="it is missing, or of a newer release")
            around, spec = cls(**raw["surroundings"]), RunSpec(**raw["spec"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} cannot be read", evidence=f"{type(error).__name__}: {error}") from error
        asked = (spec.requeue_nodes[0], spec.requeue_nodes[1]) if spec.requeue_nodes is not None else None
        around.nodes = tuple(around.nodes)
        return around, dataclasses.replace(spec, argv=tuple(spec.argv), requeue_nodes=asked)


def _requeued_by_exit_code() -> bool:
    """Whether the site's configuration, read without a command of Slurm's, has our code for "again" in RequeueExit."""
    for path in (os.environ.get("SLURM_CONF", ""), *_CONFIGURATIONS):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
        except OSError:
            continue
        found = re.search(r"^\s*RequeueExit\s*=\s*([\d,\s-]+)", text, re.IGNORECASE | re.MULTILINE)
        if text:
            ranges = re.findall(r"(\d+)(?:-(\d+))?", found[1]) if found else []
            return any(int(low) <= ExitCode.REQUEUED <= int(high or low) for low, high in ranges)
    return False


def _without_scontrol(error: CommandMissing, wish: str) -> str:
    """What that means for the run, said when it begins and not when it ends."""
    if wish == BY_EXIT_CODE:
        way = f"Slurm requeues what ends with code {int(ExitCode.REQUEUED)} here (RequeueExit), so the job comes back that way"
    elif wish:
        way = "the batch script, which has one, puts the job back when it has to end, and a cancelled job stays cancelled"
    else:
        way = (
            "the job cannot come back by itself when it is preempted or reaches its time limit. Bind Slurm's commands into the "
            "container, or start slurm-resilience from the shipped script: it requeues the job from outside"
        )
    return f"Slurm cannot be asked from here, so nobody will know why the job ends: {error.what} ({error.evidence}); {way}."
