"""From what the user asked for to a supervisor that runs.  What can be refused is refused here, before anything starts."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_resilience._clock import boot_id
from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import ConfigError, ExitCode, SlurmError
from slurm_resilience.observe import json_lines
from slurm_resilience.runtime.address import SupervisorAddress
from slurm_resilience.runtime.backend import Backend
from slurm_resilience.runtime.backend_local import LocalBackend
from slurm_resilience.runtime.command import parse_python
from slurm_resilience.runtime.job_end import leave_the_dead
from slurm_resilience.runtime.planner import check_fit, fewest_that_fit
from slurm_resilience.runtime.processes import look
from slurm_resilience.runtime.revival import expect_revival
from slurm_resilience.runtime.run_folder import RunFolder
from slurm_resilience.runtime.spec import RunSpec
from slurm_resilience.runtime.standby import acts_elsewhere, last_word, stand_by
from slurm_resilience.runtime.supervisor import Supervisor
from slurm_resilience.runtime.surroundings import Surroundings
from slurm_resilience.runtime.whereabouts import address_towards
from slurm_resilience.slurm.client import CommandClient, SlurmClient
from slurm_resilience.slurm.environment import SlurmEnvironment
from slurm_resilience.slurm.gpus import gpu_request


@dataclass(frozen=True)
class Wish:
    """What the user asked for.

    ``values`` are configuration overrides by dotted keys, the most explicit ones.  ``local``: number of pretend nodes, 0
    for the allocation that we are in.
    """

    argv: tuple[str, ...]
    run_dir: str | None = None
    config_file: str | None = None
    values: Mapping[str, Any] | None = None
    wrap: tuple[str, ...] = ()
    local: int = 0


def supervise(wish: Wish, *, show: Callable[[str], None]) -> int:
    """Keep the run alive until it is complete, moved or given up; the exit code.  Raises :class:`ConfigError` before that."""
    here = None if wish.local else SlurmEnvironment.current()
    if here is None and not wish.local:
        raise ConfigError(
            "This is no Slurm job",
            evidence="SLURM_JOB_ID is not set",
            remedy="call it from a batch script, or use `slurm-resilience submit`; --local N plays N nodes on this machine",
        )
    if here is not None:
        refuse_components(here)
    check_command(wish.argv, wrapped=bool(wish.wrap))
    around = Surroundings.of(here) if here is not None else None
    folder = RunFolder(wish.run_dir or default_run_dir(here, started_at=around.started_at if around else None))
    while (code := _supervise(wish, folder, here, around, show)) is None:
        pass
    return code


def _supervise(
    wish: Wish, folder: RunFolder, here: SlurmEnvironment | None, around: Surroundings | None, show: Callable[[str], None]
) -> int | None:
    """One supervisor from start to end; None when another one that had taken over is gone, and it is our turn again."""
    folder.prepare(show=show)
    status = folder.status()
    said = last_word(folder.path, here, status)
    if said is not None:
        show(said.sentence)
        return said.code
    nodes = here.nodes if here is not None else tuple(f"n{number}" for number in range(1, wish.local + 1))
    config, chosen = configure(wish, len(nodes))
    before = folder.supervisor()
    _refuse_a_second(before, folder)
    alive = status is not None and status.state == "running"
    if here is not None and before is not None and alive:
        refuse_another_job(before, here.job_id, folder, CommandClient())
        if acts_elsewhere(before, here):
            return stand_by(folder, here, show=show)
    run_id = folder.open_run(argv=list(wish.argv), config=config.model_dump(mode="json"), wrap=wish.wrap)
    log = folder.open_log("supervisor")

    as_json = config.observe.log_format == "json"

    def tell(line: str) -> None:
        if as_json and not line.startswith("{"):
            line = json_lines.line(line, run_id=run_id, job_id=here.job_id if here is not None else "local")
        # A reader that has gone, or a full disk, is no reason to stop keeping the run alive.
        with contextlib.suppress(OSError):
            show(line)
        with contextlib.suppress(OSError):
            log.write(line + "\n")

    first = f"slurm-resilience: run {run_id} in {folder.path}"
    tell(json_lines.line(first, run_id=run_id, run_dir=str(folder.path)) if as_json else first)
    if here is None or around is None:
        restart = before.restart_count + (not alive) if before is not None else 0
        spec = _spec(wish, config, folder, job_id="local", restart=restart, has_slurm=False)
        backend: Backend = LocalBackend(folder, wish.local)
        errands, host = None, "127.0.0.1"
    else:
        if around.problem:
            tell(around.problem)
        asked = (config.nodes[0], config.nodes[1] + config.spares) if chosen else None
        spec = _spec(
            wish, config, folder, job_id=here.job_id, restart=here.restart_count, has_slurm=True,
            kill_wait_s=around.kill_wait_s, lead_s=around.lead_s, can_requeue=around.can_requeue,
            script_requeues=around.script_requeues, requeue_nodes=asked,
            gpus=around.gpus, gpu_request=gpu_request(),
        )  # fmt: skip
        around.keep(folder.path, spec)
        backend, errands = around.backend(folder), around.errands(run_id, folder.path)
        host = address_towards(around.others(here.node))
    restarted = alive and before is not None and (before.job_id, before.restart_count) == (spec.job_id, spec.restart)
    supervisor = Supervisor(
        folder,
        run_id,
        config,
        spec,
        backend,
        host=host,
        node=here.node if here is not None else "",
        errands=errands,
        restarted=restarted,
        show=tell,
    )
    code = supervisor.run()
    if supervisor.superseded and here is not None:
        return stand_by(folder, here, show=tell)
    if around is not None and here is not None and code != ExitCode.REQUEUED:
        leave_the_dead(CommandClient(), folder, around, say=tell)
        expect_revival(folder, around, here.node, code, say=tell)
    return code


def default_run_dir(here: SlurmEnvironment | None, *, started_at: float | None = None) -> str:
    """RESILIENCE_RUN_DIR, else ``./resilience-runs/job-ID`` (``job-ARRAY_TASK`` in an array).

    The job id stays the same over requeues and the batch script starts in the same folder again, so a requeued job finds
    its run.  Job ids come round again, too: one that starts for the first time and meets a folder from before
    ``started_at`` takes a new one, ``job-ID-2``.
    """
    given = os.environ.get("RESILIENCE_RUN_DIR")
    if given:
        return given
    if here is None:
        return str(Path("resilience-runs") / "local")
    first = Path("resilience-runs") / f"job-{here.job_id}"
    number, newest = 1, first
    while (following := first.with_name(f"{first.name}-{number + 1}")).exists():
        number, newest = number + 1, following
    run = RunFolder(newest).run()
    old = run is not None and started_at is not None and here.restart_count == 0 and float(run["created"]) < started_at - 1.0
    return str(first.with_name(f"{first.name}-{number + 1}") if old else newest)


def refuse_components(here: SlurmEnvironment) -> None:
    """A heterogeneous job: its script runs on the first component, and sees the nodes of no other."""
    if here.het_size > 1:
        raise ConfigError(
            f"Job {here.job_id} is heterogeneous, with {here.het_size} components, and a run uses the nodes of one job",
            evidence=f"SLURM_HET_SIZE={here.het_size}; ranks would be started on {','.join(here.nodes)} alone",
            remedy="ask for all nodes in one component; what needs other nodes (a data server, say) goes into a job of its own",
        )


def check_command(argv: Sequence[str], *, wrapped: bool) -> None:
    """Refuse a command that cannot be started here.  A wrapped one is only known inside its wrapper."""
    if wrapped:
        return
    if shutil.which(argv[0]) is None:
        raise ConfigError(
            f"There is no command {argv[0]!r}",
            evidence=f"it is not on PATH={os.environ.get('PATH', '')}",
            remedy="give its full path, or activate the environment that has it before `slurm-resilience run`",
        )
    python = parse_python(argv)
    if python is not None and python.form == "script" and not os.path.exists(python.target):
        raise ConfigError(
            f"There is no script {python.target!r}",
            evidence=f"looked for it from {os.getcwd()}",
            remedy="give its full path, or change into its folder first",
        )


def configure(wish: Wish, nodes: int) -> tuple[ResilienceConfig, bool]:
    """The configuration, and whether the user chose the number of nodes; otherwise any number of those there will do."""
    values = dict(wish.values or {})
    config = ResilienceConfig.load(wish.config_file, values)
    chosen = "nodes" in config.model_fields_set
    if not chosen:
        most = max(1, nodes - config.spares)
        config = ResilienceConfig.load(wish.config_file, {**values, "nodes": (1, most)})
        config = config.model_copy(update={"nodes": (fewest_that_fit(config, most), most)})
    if nodes < config.nodes[0]:
        raise ConfigError(
            f"{nodes} nodes are too few: at least {config.nodes[0]} are asked for",
            evidence=f"nodes={config.nodes}, and the allocation has {nodes}",
            remedy="lower the minimum of --nodes, or ask Slurm for more nodes",
        )
    check_fit(config)
    if config.observe.active:
        from slurm_resilience.observe import telemetry

        telemetry.check(config.observe)
    return config, chosen


def _spec(wish: Wish, config: ResilienceConfig, folder: RunFolder, **slurm: Any) -> RunSpec:
    checkpoints = config.checkpoint.dir or str(folder.checkpoints)
    settings = {
        "seed": config.seed,
        "global_batch": config.global_batch,
        "micro_batch": config.micro_batch,
        "keep_accumulation": config.keep_accumulation,
        "checkpoint": config.checkpoint.model_dump(mode="json"),
        "stop_grace_s": config.limits.stop_grace_s,
    }
    slurm.setdefault("can_requeue", False)
    return RunSpec(wish.argv, os.getcwd(), {}, checkpoints, settings, **slurm)


def _refuse_a_second(before: SupervisorAddress | None, folder: RunFolder) -> None:
    """Two supervisors of one run would fence each other off for ever."""
    if before is None or before.boot_id != boot_id() or before.pid == os.getpid():
        return
    found = look(before.pid)
    if found is None or (before.started and found.started != before.started):
        return  # its number was given to another process
    try:
        words = Path(f"/proc/{before.pid}/cmdline").read_bytes()
    except OSError:
        return
    if b"slurm-resilience" in words or b"slurm_resilience" in words:
        raise ConfigError(
            f"Another supervisor works on {folder.path}",
            evidence=f"process {before.pid} on this machine: {words.replace(bytes(1), b' ').decode(errors='replace').strip()}",
            remedy="wait until it has ended, or give --run-dir another folder",
        )


def refuse_another_job(before: SupervisorAddress, job_id: str, folder: RunFolder, client: SlurmClient) -> None:
    """The same run in two jobs at once: the later one would take it from the earlier one in the middle of its work."""
    if before.job_id in (job_id, "local"):
        return
    try:
        record = client.job(before.job_id)
    except SlurmError:
        return  # over and forgotten, or nobody can tell
    if record.state.running and record.restarts == before.restart_count:
        raise ConfigError(
            f"Job {before.job_id} works on {folder.path}",
            evidence=f"it is {record.state} on {','.join(record.nodes)}, and this is job {job_id}",
            remedy=f"wait until it has ended, or `scancel {before.job_id}` and submit again; or give --run-dir another folder",
        )
