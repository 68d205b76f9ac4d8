"""Run one command on a sandbox host, as a user, and end as it ends.

Started as a program: enters all namespaces of the host's init at once through a pidfd, so that a recycled process
id cannot be meant; forks; becomes the user; runs the command.  The command dies with this process.

Standard library only.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from typing import Any, NoReturn

from slurm_resilience.sandbox import kernel
from slurm_resilience.sandbox.processes import start_time

_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC
)  # fmt: skip
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def enter(spec: dict[str, Any]) -> int:
    """The command's exit code, 128 + signal where one ended it, its process id when it was detached."""
    pidfd = os.pidfd_open(spec["pid"])
    if start_time(spec["pid"]) != spec["start"]:
        raise ProcessLookupError(f"process {spec['pid']} is not the init of {spec['host']}")
    if spec["cgroup"]:
        with open(os.path.join(spec["cgroup"], "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    kernel.setns(pidfd, _NAMESPACES | (kernel.CLONE_NEWTIME if spec["own_clock"] else 0))
    os.close(pidfd)
    for operation in spec["mount_operations"]:
        _mount_operation(operation)
    if not spec["argv"]:
        return 0
    parent_alive, watched = os.pipe()  # readable (EOF) in the child as soon as the parent is gone
    failed, failing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(watched)
        os.close(failed)
        _run(spec, parent_alive, failing)
    os.close(parent_alive)
    os.close(failing)
    if spec["detach"]:
        with os.fdopen(failed, "rb") as pipe:
            problem = pipe.read().decode(errors="replace")
        if problem:
            raise OSError(problem)
        print(pid, flush=True)
        return 0
    return _wait(pid)


def _mount_operation(operation: list[str]) -> None:
    verb, source, target = operation
    if verb == "bind":
        kernel.mount(source, target, flags=kernel.MS_BIND)
    elif verb == "unmount":
        kernel.unmount(target)
    elif verb == "attach":
        kernel.move_mount(int(source), target)
    else:
        raise ValueError(f"unknown mount operation {verb!r}")


def _run(spec: dict[str, Any], parent_alive: int, failing: int) -> NoReturn:
    code = 126
    try:
        os.umask(0o022)
        if spec["detach"]:
            os.setsid()
            source = os.open("/dev/null", os.O_RDONLY)
            sink = os.open(spec["detach"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for fd, goal in ((source, 0), (sink, 1), (sink, 2)):
                os.dup2(fd, goal)
        elif spec["new_session"]:
            os.setsid()
        account = pwd.getpwnam(spec["user"])
        if account.pw_uid != os.getuid():
            os.initgroups(account.pw_name, account.pw_gid)
            os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
            os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
        if not spec["detach"]:
            kernel.die_with_parent(signal.SIGKILL)
            if _readable(parent_alive):
                os._exit(code)
        kernel.default_signals()
        for folder in spec["cwd"]:
            try:
                os.chdir(folder)
                os.listdir(folder)  # "kept when readable": searching alone is not enough for ls and Python
                break
            except OSError:
                continue
        else:
            os.chdir("/")
        os.environ.clear()
        os.environ.update(spec["environment"])
        os.environ["PWD"] = os.getcwd()
        os.execvpe(spec["argv"][0], spec["argv"], dict(os.environ))  # noqa: S606
    except FileNotFoundError:
        code = 127
        problem = f"{spec['argv'][0]}: no such command on {spec['host']}"
    except OSError as error:
        problem = f"{spec['argv'][0]}: {error}"
    except KeyError as error:
        problem = str(error)
    if spec["detach"]:
        os.write(failing, problem.encode())
    else:
        print(f"slurm-resilience sandbox: {problem}", file=sys.stderr, flush=True)
    os._exit(code)


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


def _wait(pid: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command too; that decides
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(pid, received))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> NoReturn:
    """``argv[1]`` is the specification as JSON."""
    try:
        code = enter(json.loads(sys.argv[1]))
    except (OSError, ValueError) as error:
        print(f"slurm-resilience sandbox: {error}", file=sys.stderr, flush=True)
        code = 125
    sys.stdout.flush()
    os._exit(code)
