"""How a Slurm command can fail, as kinds that callers can tell apart."""

from __future__ import annotations

from slurm_resilience.errors import SlurmError


class CommandMissing(SlurmError):
    """The command is not installed here, or not on PATH (a container, a slim compute node)."""


class CommandTimeout(SlurmError):
    """The command was killed because it did not answer in time; what it asked for may or may not have happened."""


class ControllerUnreachable(SlurmError):
    """slurmctld (or slurmdbd) did not answer the command: nothing is known, and trying again is right."""


class CommandNotStarted(ControllerUnreachable):
    """This machine could not start the command at this moment: no memory, no process, no file left to be had."""


class NoSuchJob(SlurmError):
    """The controller knows no job of that id (any more)."""


class JobNotPending(SlurmError):
    """The change is only allowed while the job is pending, and it is not."""


class JobFinished(SlurmError):
    """The job is over, though its nodes may still be completing: cancelled, timed out, ended by itself."""


class RequeueDisabled(SlurmError):
    """The job was submitted with --no-requeue, or the site has JobRequeue=0."""


class NoSuchNode(SlurmError):
    """A node name that this cluster does not have."""


class NotPermitted(SlurmError):
    """Slurm does not let this user do that."""


# What Slurm writes on stderr, in its own words.  Source: slurm_errno.c of 22.05 and 25.05; checked on 22.05.8.
_SENTENCES: tuple[tuple[str, type[SlurmError]], ...] = (
    ("Invalid job id specified", NoSuchJob),
    ("Job is no longer pending execution", JobNotPending),
    ("Job has already finished", JobFinished),
    ("Job/step already completing or completed", JobFinished),
    ("Requested operation is presently disabled", RequeueDisabled),
    ("Invalid node name specified", NoSuchNode),
    ("Access/permission denied", NotPermitted),
    ("Invalid user id", NotPermitted),
    ("Unable to contact slurm controller", ControllerUnreachable),
    ("Zero Bytes were transmitted or received", ControllerUnreachable),
    ("Socket timed out", ControllerUnreachable),
    ("Connection refused", ControllerUnreachable),
    ("Connection reset by peer", ControllerUnreachable),
    ("Transport endpoint is not connected", ControllerUnreachable),
    ("Resource temporarily unavailable", ControllerUnreachable),
    ("Slurm backup controller in standby mode", ControllerUnreachable),
    ("Slurm temporarily unable to accept job, sleeping and retrying", ControllerUnreachable),
    ("Unable to establish control machine address", ControllerUnreachable),
    ("Could not establish a configuration source", ControllerUnreachable),
    ("Protocol authentication error", ControllerUnreachable),
)


def classify(text: str) -> type[SlurmError]:
    """The kind of failure that a command's stderr speaks of; plain :class:`SlurmError` when we do not know the words."""
    for sentence, kind in _SENTENCES:
        if sentence in text:
            return kind
    return SlurmError
