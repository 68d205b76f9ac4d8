"""submitit's Slurm executor, with a run folder for every submission and the resilient batch script instead of an srun."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.errors import SlurmError, SubmitError
from slurm_resilience.slurm.client import CommandClient, SlurmClient
from slurm_resilience.slurm.environment import submission_environment
from slurm_resilience.slurm.failures import CommandTimeout
from slurm_resilience.slurm.waiting import sweep
from slurm_resilience.submit.at_work import refuse_a_second
from slurm_resilience.submit.folders import check_folder, new_run_dir
from slurm_resilience.submit.job import ResilientJob
from slurm_resilience.submit.parameters import SlurmRequest, settle
from slurm_resilience.submit.prepare import Work, command_of, fill, prepare, settings_of, work_of, write_script
from slurm_resilience.submit.script import Shell, render
from slurm_resilience.submit.snapshot import Source, next_place, take

# sbatch itself waits for a busy controller; killing it early would leave the question open whether the job was queued.
_SBATCH_TIMEOUT_S = 120.0
# A question whose answer is of use, and not needed.
_ASK_TIMEOUT_S = 5.0


class ResilientExecutor(SlurmExecutor):
    """Submits functions and commands as resilient runs; each gets a folder of its own inside ``folder``.

    ``python`` is the interpreter of supervisor, agents and functions (default: this one); ``snapshot``: whether, or from
    which folder, the code is copied at each submission (:mod:`slurm_resilience.submit.snapshot`).  What makes no sense is
    refused when it is said: by then nothing is written or queued.
    """

    job_class = ResilientJob  # type: ignore[assignment]  # ours is made by submit_work(), with more than submitit knows

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        config: ResilienceConfig | None = None,
        python: str | None = None,
        client: SlurmClient | None = None,
        own_names: Sequence[str] = (),
        snapshot: bool | str | os.PathLike[str] | None = None,
    ) -> None:
        if self.affinity() <= 0:
            raise SubmitError(
                "There is no sbatch here, so nothing can be queued",
                evidence="it is not on PATH",
                remedy="submit from a login node of the cluster. On this machine alone `slurm-resilience run --local K -- CMD` "
                "plays K nodes (in Python: cluster='local'); `slurm-resilience templates render` makes a script to take there",
            )
        super().__init__(check_folder(folder))
        self.config = config or ResilienceConfig()
        self._client = client or CommandClient(timeout_s=_SBATCH_TIMEOUT_S)
        self._asks = client or CommandClient(timeout_s=_ASK_TIMEOUT_S)
        self._python = python or sys.executable
        self._own_names = tuple(own_names)
        self._snapshot = snapshot
        self._request: SlurmRequest = settle({}, self.config)

    @classmethod
    def name(cls) -> str:
        return "resilient"

    @classmethod
    def affinity(cls) -> int:
        return 2 if shutil.which("sbatch") else -1

    # -- submitit's hooks -------------------------------------------------------------------------------------------

    def _internal_update_parameters(self, **parameters: Any) -> None:
        self._request = settle({**self.parameters, **parameters}, self.config, own_names=self._own_names)
        self.parameters.update(parameters)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        works = [work_of(each.function, each.args, each.kwargs) for each in delayed_submissions]
        return list(self.submit_works(works)) if len(works) > 1 else [self.submit_work(work) for work in works]

    def _num_tasks(self) -> int:
        """To submitit the job is one task, whose result is rank 0's; how many ranks there are changes over its life."""
        return 1

    # -- what we add ------------------------------------------------------------------------------------------------

    @property
    def job_name(self) -> str:
        return str(self._request.options.get("job-name", "resilient"))

    def header(self, output: str, **more: Any) -> str:
        """The shebang and the #SBATCH lines, as submitit writes them."""
        options = {name: value for name, value in self._request.options.items() if name not in ("signal", "job-name")}
        before, self.parameters = self.parameters, {
            "nodes": options.pop("nodes"),
            "time": options.pop("time", None),
            "job_name": self.job_name,
            "wckey": options.pop("wckey", None),  # submitit would put its own name there, which sites that use keys refuse
            "signal_delay_s": self._request.lead_s,
            "stderr_to_stdout": True,
            "use_srun": False,
            "additional_parameters": {**options, **more, "output": output},
        }  # fmt: skip
        try:
            text: str = super()._make_submission_file_text("", "")
        finally:
            self.parameters = before
        return text.partition("\n# command\n")[0]

    def script(self, run_dir: Path, work: Work) -> str:
        """The whole script that :meth:`submit_work` would queue, without writing anything."""
        return render(self.header(log_pattern(run_dir)), self._settings(run_dir, work, self._code(run_dir)))

    def submit_work(self, work: Work, *, run_dir: Path | None = None) -> ResilientJob[Any]:
        """Queue it.  ``run_dir``: the run's own folder; one that holds a run already goes on, unless a job of it is in Slurm.

        Raises :class:`ConfigError` before anything is queued, :class:`SubmitError` when Slurm refuses.
        """
        if run_dir is not None:
            dependency = str(self._request.options.get("dependency", ""))
            refuse_a_second(self._asks, run_dir, dependency=dependency, name=self.job_name)
        was_there = run_dir is not None and os.path.exists(run_dir)
        path = run_dir or new_run_dir(self.folder, self.job_name)
        code = None
        try:
            code = self._code(path)
            if code is not None:
                take(*code)
            settings = self._settings(path, work, code)
            prepared = prepare(path, work, self.config, header=self.header(log_pattern(path)), settings=settings)
            submitted_at = time.time()
            job_id = self._queue(prepared.script)
        except CommandTimeout:
            raise  # it may have been queued after all: the folder must stay
        except BaseException:
            if not was_there:
                shutil.rmtree(path, ignore_errors=True)
            elif code is not None:
                shutil.rmtree(code[1], ignore_errors=True)
            raise
        job = ResilientJob[Any](
            path,
            {
                "cluster": "slurm",
                "job_id": job_id,
                "run_id": prepared.run_id,
                "submitted_at": submitted_at,
                "script": f"{path.name}/call/{prepared.script.name}",
            },
        )
        job.save_description()
        return job

    def submit_works(self, works: Sequence[Work], *, parallel: int | None = None) -> list[ResilientJob[Any]]:
        """Queue them as the tasks of one array, each a run with a folder of its own; at most ``parallel`` run at a time.

        The works differ in what they call with, not in their options.  Raises like :meth:`submit_work`.
        """
        base = new_run_dir(self.folder, self.job_name)
        script, where = base / "submission.sh", [base / f"task-{number}" for number in range(len(works))]
        array = f"0-{len(works) - 1}" + (f"%{parallel}" if parallel else "")
        output = log_pattern(base / "task-TASK", "%A_%a").replace("task-TASK", "task-%a")
        code = self._code(base)
        each_dir = Shell(f'{shlex.quote(str(base))}/task-"$SLURM_ARRAY_TASK_ID"')
        try:
            if code is not None:
                take(*code)
            run_ids = [
                fill(path, work, self.config, command=command_of(path, work, self._python))
                for path, work in zip(where, works, strict=True)
            ]
            write_script(script, self.header(output, array=array), self._settings(each_dir, works[0], code))
            submitted_at = time.time()
            array_id = self._queue(script)
        except CommandTimeout:
            raise
        except BaseException:
            shutil.rmtree(base, ignore_errors=True)
            raise
        jobs = []
        for number, (path, run_id) in enumerate(zip(where, run_ids, strict=True)):
            description = {"cluster": "slurm", "job_id": f"{array_id}_{number}", "run_id": run_id, "submitted_at": submitted_at,
                           "script": f"{base.name}/{script.name}"}  # fmt: skip
            jobs.append(ResilientJob[Any](path, description))
            jobs[-1].save_description()
        return jobs

    def _code(self, run_dir: Path) -> tuple[Source, Path] | None:
        """What a snapshot is to be made of, and where; None where none was asked for."""
        if not self._snapshot:
            return None
        folder = self._request.options.get("chdir", os.getcwd()) if self._snapshot is True else self._snapshot
        return Source.of(folder), next_place(run_dir)

    def _settings(self, run_dir: Path | Shell, work: Work, code: tuple[Source, Path] | None = None) -> Any:
        lines: list[str] = []
        if code is not None:
            source, place = code
            lines = source.lines(place)
            work = dataclasses.replace(work, command=source.command(work.command, place)) if work.command else work
        return settings_of(
            run_dir,
            work,
            python=self._python,
            lead_s=self._request.lead_s,
            setup=[*lines, *self._request.setup],
            teardown=self._request.teardown,
        )

    def _queue(self, script: Path) -> str:
        with contextlib.suppress(SlurmError):  # whoever looks at the queue next frees what a dead process left in hold
            sweep(self._client, getpass.getuser())
        decided = {*self._request.options, "job-name", "output", "error", "time"}
        try:
            return self._client.submit(str(script), environment=submission_environment(decided=decided))
        except CommandTimeout as error:
            raise CommandTimeout(
                "sbatch gave no answer, so the job may or may not be queued",
                evidence=error.evidence,
                remedy=f"look for {self.job_name!r} with `squeue --me` before submitting again; its script: {script}",
            ) from error
        except SlurmError as error:
            raise SubmitError(
                "Slurm refused the job", evidence=error.evidence or error.what, remedy="change what sbatch complains about"
            ) from error


class DryRun(ResilientExecutor):
    """Shows the script and queues nothing, so that it needs no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def _queue(self, script: Path) -> str:
        raise SubmitError(f"{script} is not queued: this is a dry run")


def log_pattern(run_dir: Path, job: str = "%j") -> str:
    """The job's log as sbatch's file name pattern: only our own %j is one."""
    return str(run_dir).replace("%", "%%") + f"/logs/job-{job}.out"
