"""Run a Python command line in this process exactly as the interpreter itself would have run it.

Same ``__main__``, ``sys.argv``, ``sys.path[0]``, tracebacks and exit codes, so that a program behaves the same when it is
forked from a warm launcher.  Standard library only, loaded by file path: the ranks' interpreter need not have this package.

The hash seed is the launcher's (all ranks of a node share it); random, numpy and multiprocessing get entropy of their own.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any

# Where the progress page keeps the number of completed steps; see progress/page.py, which this file may not import.
_STEP_AT = 64
_MAX_FACT_BYTES = 60_000
_ASKED = 8  # names that may come between the search for a module and its entry among the modules


class ImportLog:
    """A finder that finds nothing: it writes down what this process imports, for the next launcher to preload.

    A name that was only looked for (``importlib.util.find_spec``) must not be imported by a launcher, so a name is written
    down when it is seen among the modules, at one of the next calls.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()
        self._asked: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Note the name, and let the real finders look."""
        if os.getpid() != self._pid:
            return
        came = [asked for asked in self._asked if asked in sys.modules]
        self._asked = [*(asked for asked in self._asked if asked not in came), name][-_ASKED:]
        if came:
            with contextlib.suppress(OSError):
                os.write(self._fd, "".join(f"{one}\n" for one in came).encode())


def settle(environment: dict[str, str], cwd: str) -> None:
    """Give a forked process what a new one would have had: environment, folder, entropy, number of threads."""
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(cwd)
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    threads = environment.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit() and int(threads) > 1:
        torch.set_num_threads(int(threads))  # the launcher imported it with one thread
    importlib.invalidate_caches()


def run(form: str, target: str, args: Sequence[str], command: Sequence[str]) -> None:
    """Run the program; returns when it does, raises what it raises.  ``command`` is the whole line as the user gave it."""
    if form == "script" and not _is_source(target):
        _exec_cold(command)
    sys.orig_argv = list(command)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if form == "module":
        import runpy

        sys.argv = ["-m", *args]
        _put_path_first(os.getcwd())
        runpy._run_module_as_main(target, True)  # type: ignore[attr-defined]  # what CPython's -m calls
        return
    if form == "code":
        sys.argv = ["-c", *args]
        _put_path_first("")
        main.__dict__["__loader__"] = importlib.machinery.BuiltinImporter
        exec(compile(target, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102 -- this is what -c means
        return
    sys.argv = [target, *args]
    path = target if os.path.isabs(target) else os.path.join(os.getcwd(), target)
    _put_path_first(os.path.dirname(os.path.realpath(target)))
    main.__dict__.update(__file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 -- this is what running a script means


def _is_source(path: str) -> bool:
    """A plain source file.  Folders, archives and bytecode, and what is not there, are left to the interpreter itself."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError:
        return False
    return start != importlib.util.MAGIC_NUMBER and not start.startswith(b"PK\x03\x04")


def _exec_cold(command: Sequence[str]) -> None:
    """Let the interpreter itself run it; Slurm's warnings stay without effect until the program installs its handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, *command[1:]])  # noqa: S606


def _put_path_first(entry: str) -> None:
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path.insert(0, entry)


def report_exception(error: BaseException, *, facts: str, page: str, attempt: int, rank: int) -> None:
    """Tell the agent what ended this rank, at once: the first exception in time matters, not the echoes on other ranks.

    Says nothing when the program marked the exception as already told (``error.resilience_reported``).
    """
    if getattr(error, "resilience_reported", False):
        return
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-16_000:]
    step = -1  # none was completed
    with contextlib.suppress(OSError, struct.error), open(page, "rb") as file:
        file.seek(_STEP_AT)
        (step,) = struct.unpack("<q", file.read(8))
    fields: dict[str, Any] = {"type": type(error).__qualname__, "message": str(error)[:4_000], "traceback": text}
    if step >= 0:
        fields["step"] = step
    if any(kind.__module__ == "slurm_resilience.errors" for kind in type(error).__mro__):
        fields["exit_code"] = int(error.exit_code)  # type: ignore[attr-defined]  # this file may not import the class
    raw = json.dumps({"kind": "exception", "attempt": attempt, "rank": rank, "fields": fields}).encode()[:_MAX_FACT_BYTES]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(1.0)
        sender.sendto(raw, facts)


def strip_frames(error: BaseException, ours: Sequence[str]) -> None:
    """Take the frames of these files off the top of its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    error.__traceback__ = trace


def show_exception(error: BaseException) -> None:
    """Print it through the program's own hook.  The interpreter, when it gets it too, prints nothing more."""
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = lambda *_: None
