"""Agents on the nodes of a Slurm allocation: one srun for each, which is let go of once its agent has called.

One srun per node, so that one node's trouble cannot end the agents of others: ``--no-kill`` restrains slurmctld only,
while srun itself aborts a step on an I/O error or when a node answers that it does not know the step.  And none for
longer than needed: at the end of a job Slurm sends TERM to everything in the batch script's container, and an srun that
gets it kills its step at once, saved or not.  The agents live on without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping

from slurm_resilience.runtime.backend import Ended, last_words
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.slurm.child import SHIELDED
from slurm_resilience.slurm.gpus import gpu_request
from slurm_resilience.slurm.nodeset import fold

# These would shape the agents' steps after the batch script's own request, which is about something else.
# SLURM_CPUS_PER_TASK makes srun (23.11+) ask for --exact, which would confine the ranks to that many CPUs.
_NOT_FOR_SRUN = (
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_TASKS_PER_NODE",
    "SLURM_DISTRIBUTION", "SLURM_ARBITRARY_NODELIST", "SLURM_KILL_BAD_EXIT", "SLURM_WAIT", "SLURM_EXACT", "SLURM_EXCLUSIVE",
    "SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURM_HINT", "SLURM_THREADS_PER_CORE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE",
    "SLURM_STDINMODE", "SLURM_UNBUFFEREDIO", "SLURM_LABELIO", "SLURM_EXPORT_ENV", "SLURM_NO_KILL", "SLURM_OVERLAP",
    "SLURM_WORKING_DIR", "SLURM_MPI_TYPE", "SLURM_SRUN_MULTI",
)  # fmt: skip


def srun_command(
    job_id: str, node: str, run_dir: str, *, binds: bool, gpus: int | None = None, others: Iterable[str] = ()
) -> list[str]:
    """The srun of one agent.

    ``--overlap`` without ``--exact`` gives the step all CPUs and memory that the job has on the node, beside whatever
    else runs there.  ``binds``: this cluster binds tasks to cores, which the one task must not be.  ``gpus``: how many the job
    holds there.  They are asked for by ``--gpus-per-node``: without a word the step inherits the job's own request, so that one
    of ``--gpus=6`` on two nodes is refused, and one of ``--gpus-per-task=2`` gets two; and of the steps with ``--gpus`` and a
    named node 24.11 starts two, while the others wait for their end.  ``others``: the rest of a job whose nodes hold different
    numbers.  They are excluded instead of this one being named, since a named node is refused more GPUs than the last of
    the job has.  Source: tried on 22.05.8 and 24.11.5, with each way of asking for GPUs, even and uneven.
    """
    command = ["slurm_resilience.runtime.agent", "--run-dir", run_dir, "--node", node]
    return step_command(job_id, node, command, binds=binds, gpus=gpus, others=others, name="resilience-agent")


def step_command(
    job_id: str, node: str, module: list[str], *, binds: bool, gpus: int | None, name: str, others: Iterable[str] = ()
) -> list[str]:
    """The srun of any one process of ours on ``node``: ``module`` and its arguments, with this interpreter."""
    bind = ["--cpu-bind=none"] if binds else []
    bind += [f"--gpus-per-node={gpus}"] if gpus else ["--gres=none"] if gpus == 0 else []
    rest = fold(others)
    where = f"--exclude={rest}" if rest else f"--nodelist={node}"
    return [
        "srun", f"--jobid={job_id}", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--nodes=1", "--ntasks=1",
        where, *bind, "--mpi=none", "--export=ALL", "--input=none", "--unbuffered", "--quiet",
        f"--job-name={name}", sys.executable, "-m", *module,
    ]  # fmt: skip


def step_environment(*, gpus: bool) -> dict[str, str]:
    """What the srun of a process of ours may know of the job: not what shapes steps.  ``gpus``: it says itself how many."""
    left_out = {*_NOT_FOR_SRUN, *(gpu_request() if gpus else ())}
    return {name: value for name, value in os.environ.items() if name not in left_out}


class SlurmBackend:
    """The allocation of this job.  ``nodes`` come from Slurm's own list, never from counts that may be stale.

    ``gpus``: those that the job holds on each node, where that is known.
    """

    def __init__(
        self, folder: RunFolder, job_id: str, nodes: tuple[str, ...], *, binds: bool, gpus: Mapping[str, int] | None = None
    ) -> None:
        self._binds = binds
        self._gpus = dict(gpus or {})
        self._folder = folder
        self._job_id = job_id
        self._nodes = nodes
        self._sruns: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._environment = step_environment(gpus=bool(gpus))

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._nodes

    def start(self, node: str) -> None:
        self._let_go(node)
        uneven = len({self._gpus.get(name) for name in self._nodes}) > 1
        command = srun_command(
            self._job_id, node, str(self._folder.path), binds=self._binds, gpus=self._gpus.get(node),
            others=[name for name in self._nodes if name != node] if uneven else (),
        )  # fmt: skip
        with open(self._folder.start_log(node), "ab") as file:
            start = file.tell()
            # Blocked, not ignored: srun itself sets what it does with signals, and until then none must reach it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
            try:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=self._environment
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._sruns[node] = (child, start)

    def settled(self, node: str) -> None:
        self._let_go(node)

    def poll(self) -> list[Ended]:
        ended = []
        for node, (child, start) in list(self._sruns.items()):
            code = child.poll()
            if code is not None:
                del self._sruns[node]
                ended.append(Ended(node, code, last_words(self._folder.start_log(node), start)))
        return ended

    def close(self) -> None:
        for node in list(self._sruns):
            self._let_go(node)

    def _let_go(self, node: str) -> None:
        """Kill srun's whole group: were only its first process killed, the helper would cancel the step.

        Source: srun forks a child that kills the step when its parent dies unexpectedly (src/srun/srun.c, shepherd).
        """
        child, _ = self._sruns.pop(node, (None, 0))
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1.0)
