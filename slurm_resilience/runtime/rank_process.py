"""Turn a process, just forked by a launcher or started cold, into a rank.

Standard library only, loaded by file path: the ranks' interpreter need not have this package.
"""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import mmap
import os
import signal
import struct
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

_STOP_AT = 1024  # the stop order in the progress page; see progress/page.py, which this file may not import
STACK_SIGNAL = int(signal.SIGRTMAX) - 4  # its Python stacks are written into a file, whatever the rank is doing
_FLAGGED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def flag_signals(page: str) -> None:
    """Let Slurm's warnings pass until the program installs handlers of its own (a Run does).

    At a preemption Slurm sends TERM to every process of a step, long before the grace is over; whether this rank has to end
    is the supervisor's decision.  So TERM ends a rank only once its page carries the order to stop.  Children of the rank
    get the default back, by exec and by fork, so that ``terminate()`` works on them as ever.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and is_ordered_to_stop(page):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    before: dict[int, Any] = {}  # thread -> its mask

    def hold() -> None:  # a signal that came to a new child before its default is back would be lost
        before[_thread.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _FLAGGED)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.pop(_thread.get_ident()))

    def in_child() -> None:
        for number in _FLAGGED:
            if signal.getsignal(number) is on_signal:
                signal.signal(number, signal.SIG_DFL)
        let_go()

    for number in _FLAGGED:
        signal.signal(number, on_signal)
    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=in_child)


def is_ordered_to_stop(page: str) -> bool:
    try:
        fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as view:
            return bool(struct.unpack_from("<q", view, _STOP_AT)[0])
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)


def _become_rank(request: dict[str, Any], *, forked: bool) -> None:
    """Turn this process into the rank: session, log, environment, signals."""
    flag_signals(request["page"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if forked:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.makedirs(os.path.dirname(request["log"]), exist_ok=True)
        out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(null)
        os.close(out)
        if request["header"]:
            os.write(1, request["header"].encode() + b"\n")
    take_name(f"sr-rank-{request['rank']}", request["argv"])
    show_stacks(request.get("stacks", ""))


def show_stacks(path: str) -> None:
    """Say where the program was when it dies of a signal such as SIGSEGV, and into ``path`` whenever the agent asks."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2, all_threads=False)
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def take_name(name: str, command: Sequence[str]) -> None:
    """Be found by ``pgrep sr-rank`` and by ``pgrep -f train.py``: a forked rank would look like its launcher for ever.

    The command line is what the kernel reads from this process's own memory, so it is written over there, as far as there is
    room for it.  Source: prctl(2), PR_SET_NAME; proc_pid_stat(5), arg_start and arg_end, which read 0 where it is not
    allowed to know them.
    """
    ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    room = end - start
    if start > 0 and room > 1:
        words = b"\0".join(os.fsencode(word) for word in (name, *command))[: room - 1]
        ctypes.memmove(start, words.ljust(room, b"\0"), room)


def run(main_module: ModuleType, request: dict[str, Any], *, forked: bool) -> None:
    """Be the rank: returns or raises as the program does, after the agent was told of an exception."""
    try:
        _become_rank(request, forked=forked)
        if forked:
            main_module.settle(request["env"], request["cwd"])
        if request["imports"]:
            sys.meta_path.insert(0, main_module.ImportLog(request["imports"]))
        main_module.run(request["form"], request["target"], request["args"], request["argv"])
    except SystemExit:
        raise
    except BaseException as error:
        main_module.strip_frames(error, (__file__, main_module.__file__))
        main_module.report_exception(
            error, facts=request["facts"], page=request["page"], attempt=request["attempt"], rank=request["rank"]
        )
        main_module.show_exception(error)
        raise
