"""The client against commands that answer as a real Slurm did: programs on PATH that print recorded answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm import failures as f
from slurm_resilience.slurm.client import CommandClient
from slurm_resilience.slurm.states import JobState
from tests.unit.slurm.recordings import RECORDED

Answers = Callable[..., CommandClient]


@pytest.fixture
def answering(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A client whose ``command`` prints a recorded file, or ``err`` with ``code``, and writes its arguments down."""
    bin_dir = tmp_path_factory.mktemp("bin")

    def make(command: str, *, recorded: str = "", out: str = "", err: str = "", code: int = 0) -> CommandClient:
        show = f"cat '{RECORDED / recorded}'" if recorded else f"printf '%s' '{out}'"
        script = f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{bin_dir}/arguments'\n{show}\nprintf '%s' '{err}' >&2\nexit {code}\n"
        (bin_dir / command).write_text(script)
        (bin_dir / command).chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_dir}{os.pathsep}{os.environ['PATH']}")
        return CommandClient(timeout_s=60)

    make.arguments = lambda: (bin_dir / "arguments").read_text().splitlines()  # type: ignore[attr-defined]
    return make


def test_job(answering: Answers) -> None:
    record = answering("scontrol", recorded="job-running.txt").job("32")
    assert record.state is JobState.RUNNING
    assert answering.arguments() == ["-o", "show", "job", "32"]  # type: ignore[attr-defined]


def test_of_an_array_the_task_that_was_asked_for(answering: Answers) -> None:
    client = answering("scontrol", recorded="job-array.txt")
    first = client.job("35_1")
    assert first.fields["ArrayTaskId"] == "1"
    assert client.job("35_2").fields["ArrayTaskId"] == "2"
    assert client.job(first.raw_job_id).fields["ArrayTaskId"] == "1"


def test_a_task_that_was_cancelled_before_it_began_is_not_known(answering: Answers) -> None:
    """22.05.8 ends with 1 and says so on stdout, in other words than for a job that it does not know."""
    with pytest.raises(f.NoSuchJob):
        answering("scontrol", out="Job 8_1 not found", code=1).job("8_1")


@pytest.mark.parametrize(
    ("said", "kind"),
    [  # as 22.05.8 said them
        ("slurm_load_jobs error: Invalid job id specified", f.NoSuchJob),
        ("Job is no longer pending execution for job 3", f.JobNotPending),
        ("Job has already finished for job 3\nslurm_suspend error: Job has already finished", f.JobFinished),
        ("Requested operation is presently disabled for job 9", f.RequeueDisabled),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", f.ControllerUnreachable),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", f.ControllerUnreachable),
        ("slurm_update error: Invalid user id", f.NotPermitted),
        ("slurm_update error: Invalid node name specified", f.NoSuchNode),
        ("something nobody has seen", SlurmError),
    ],
)
def test_each_refusal_is_told_apart(answering: Answers, said: str, kind: type[SlurmError]) -> None:
    with pytest.raises(SlurmError) as caught:
        answering("scontrol", err=said, code=1).update("3", Comment="x")
    assert type(caught.value) is kind
    assert said.split()[0] in caught.value.evidence


@pytest.mark.parametrize("verb", ["requeue", "requeuehold"])
def test_already_pending_is_success(answering: Answers, verb: str) -> None:
    assert getattr(answering("scontrol", err="Job is pending execution for job 7", code=1), verb)("7") is False
    assert getattr(answering("scontrol"), verb)("7") is True


def test_an_update_is_one_argument_a_field(answering: Answers) -> None:
    answering("scontrol").update("7_1", NumNodes="2-3", Comment="a b; $(c)")
    assert answering.arguments() == ["update", "JobId=7_1", "NumNodes=2-3", "Comment=a b; $(c)"]  # type: ignore[attr-defined]


def test_shrinking_a_job_leaves_no_files_behind(answering: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real scontrol writes slurm_job_N_resize.sh into its working directory."""
    monkeypatch.chdir(tmp_path)
    client = answering("scontrol", out="")
    script = Path(os.environ["PATH"].split(os.pathsep)[0]) / "scontrol"
    script.write_text("#!/bin/sh\ntouch slurm_job_7_resize.sh\n")
    client.update("7", NodeList="n[1-2]")
    assert list(tmp_path.iterdir()) == []
    client.update("7", Comment="where other updates run")
    assert [path.name for path in tmp_path.iterdir()] == ["slurm_job_7_resize.sh"]


def test_unknown_nodes_are_left_out(answering: Answers) -> None:
    """scontrol prints those that it knows, and an error with code 1."""
    client = answering("scontrol", recorded="nodes.txt", err="Node nope not found", code=1)
    assert set(client.nodes(["n1", "n2", "n3", "n4", "nope"])) == {"n1", "n2", "n3", "n4"}


def test_accounting_shows_all_runs_and_who_cancelled(answering: Answers) -> None:
    client = answering("sacct", recorded="sacct-cancelled.txt")
    (run,) = client.history("35_1")
    assert (run.state, run.cancelled_by) == (JobState.CANCELLED, 1001)
    assert run.submit_at is not None
    assert client.history("99") == []


def test_cancelling_what_is_gone_is_success(answering: Answers) -> None:
    answering("scancel", err="scancel: error: Kill job error on job id 9: Invalid job id specified", code=1).cancel("9")
    with pytest.raises(f.ControllerUnreachable):
        answering("scancel", err="Unable to contact slurm controller", code=1).cancel("9")


def test_submit_reads_the_id_with_and_without_a_cluster(answering: Answers) -> None:
    assert answering("sbatch", out="123").submit("x.sh") == "123"
    assert answering("sbatch", out="123;west").submit("x.sh") == "123"
    with pytest.raises(SlurmError, match="no job id"):
        answering("sbatch", out="queued, thanks").submit("x.sh")


def test_only_jobs_of_their_own_are_pending(answering: Answers) -> None:
    """The rest of an array that has not started was never requeued, and has no record of its own."""
    answering("squeue", out="33|PENDING|BeginTime|a | b\n40_[3-9]|PENDING|None|(null)\n34|RUNNING|None|(null)\n")
    client = answering("scontrol", recorded="job-requeued-pending.txt")
    assert [record.job_id for record in client.pending("alice")] == ["33"]
    assert [(each.job_id, each.comment) for each in client.queue("alice")] == [("33", "a | b"), ("34", "")]
