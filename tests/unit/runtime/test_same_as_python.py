"""A program behaves the same under the interpreter itself, forked from a warm launcher, and started cold by an agent."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resilience.runtime import messages as m
from tests.unit.runtime.agent_stage import Peer, Stage

WHO_AM_I = """
'the docstring'
import sys, os
print(__name__, repr(__file__), __spec__ and __spec__.name, __package__, __doc__, type(__loader__).__name__)
print(sys.argv, sys.orig_argv[1:], sys.path, os.getcwd(), sorted(k for k in globals() if k.startswith('__')))
print(sys.modules['__main__'].__dict__ is globals(), sys.stdout.line_buffering, sys.stdout.encoding, sys.stdin.read())
print('launcher' in sys.modules, [name for name in os.environ if name in ('RES_OPTIONS', 'OPENBLAS_NUM_THREADS')])
import signal
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGCHLD), os.umask(0o22))
"""

# name -> (files, arguments after "python")
PROGRAMS: dict[str, tuple[dict[str, str], list[str]]] = {
    "script": ({"prog.py": WHO_AM_I}, ["prog.py", "--lr", "1 2"]),
    "script-dot": ({"prog.py": WHO_AM_I}, ["./prog.py"]),
    "script-in-folder": (
        {"sub/prog.py": WHO_AM_I + "import beside\n", "sub/beside.py": "print('beside')"},
        ["sub/prog.py", "-u"],
    ),
    "script-like-one-of-ours": ({"prog.py": "import agent\nimport launcher_link", "agent.py": "print('mine')"}, ["prog.py"]),
    "module": (
        {"pkg/__init__.py": "", "pkg/tool.py": WHO_AM_I + "from . import other\n", "pkg/other.py": "print(__name__)"},
        ["-m", "pkg.tool", "x"],
    ),
    "package": ({"pkg/__init__.py": "print('init')", "pkg/__main__.py": WHO_AM_I}, ["-m", "pkg"]),
    "code": ({}, ["-c", WHO_AM_I.replace("__file__", "'no file'"), "x"]),
    "folder": ({"app/__main__.py": "import sys; print(sys.argv, __name__)"}, ["app", "x"]),
    "missing-script": ({}, ["nowhere.py"]),
    "missing-module": ({}, ["-m", "nowhere.at_all"]),
    "syntax-error": ({"prog.py": "x = = 1\n"}, ["prog.py"]),
    "exit-3": ({"prog.py": "import sys; print('unflushed'); sys.exit(3)"}, ["prog.py"]),
    "exit-text": ({"prog.py": "raise SystemExit('the reason')"}, ["prog.py"]),
    "exit-none": ({"prog.py": "raise SystemExit"}, ["prog.py"]),
    "exit-huge": ({"prog.py": "raise SystemExit(1 << 40)"}, ["prog.py"]),
    "os-exit": ({"prog.py": "import os; print('lost'); os._exit(5)"}, ["prog.py"]),
    "exception": (
        {"prog.py": "def f():\n    raise ValueError('bad')\ntry:\n    {}['x']\nexcept KeyError as e:\n    f()\n"},
        ["prog.py"],
    ),
    "exception-in-module": ({"pkg/__init__.py": "", "pkg/bad.py": "1/0"}, ["-m", "pkg.bad"]),
    "hook": ({"prog.py": "import sys\nsys.excepthook = lambda t, v, b: print('hook', t, v, b.tb_lineno)\n1/0"}, ["prog.py"]),
    # A SIGSEGV is told with a Python stack in addition: see slurm_resilience/runtime/rank_process.py.
    "killed": ({"prog.py": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}, ["prog.py"]),
    "interrupt": ({"prog.py": "import os, signal; os.kill(os.getpid(), signal.SIGINT)"}, ["prog.py"]),
    "at-exit": (
        {"prog.py": "import atexit, threading, time, sys\natexit.register(print, 'at exit')\n"
         "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')\nsys.exit(4)"},
        ["prog.py"],
    ),
    "exit-in-at-exit": ({"prog.py": "import atexit, os\natexit.register(os._exit, 9)"}, ["prog.py"]),
    "destructor": ({"prog.py": "class A:\n    def __del__(self): print('gone')\na = A()\n"}, ["prog.py"]),
    "spawn": (
        {"prog.py": "import multiprocessing as mp, helper\n"
         "def f(x): return x * x, __name__\n"
         "if __name__ == '__main__':\n"
         "    mp.set_start_method('spawn')\n"
         "    with mp.Pool(2) as pool: print(pool.map(f, [1, 2, 3]))\n",
         "helper.py": ""},
        ["prog.py"],
    ),
    "spawn-from-module": (
        {"pkg/__init__.py": "", "pkg/tool.py": "import multiprocessing as mp\nfrom . import other\n"
         "if __name__ == '__main__':\n"
         "    p = mp.get_context('spawn').Process(target=other.say); p.start(); p.join(); print(p.exitcode)\n",
         "pkg/other.py": "def say(): print(__name__, flush=True)"},
        ["-m", "pkg.tool"],
    ),
    "fork-terminate": (
        {"prog.py": "import multiprocessing as mp, time\n"
         "p = mp.get_context('fork').Process(target=time.sleep, args=(60,))\n"
         "p.start(); p.terminate(); p.join(); print(p.exitcode)"},
        ["prog.py"],
    ),
    "folder-of-multiprocessing": ({"prog.py": "import multiprocessing.process as p; print(p.ORIGINAL_DIR)"}, ["prog.py"]),
    "child-terminate": (
        {"prog.py": "import subprocess\np = subprocess.Popen(['sleep', '60']); p.terminate(); print(p.wait())"},
        ["prog.py"],
    ),
}  # fmt: skip


class Ways:
    """One folder for programs, one agent that forks and one that starts cold."""

    def __init__(self, warm: Stage, cold: Stage) -> None:
        self.stages = {"warm": warm, "cold": cold}
        self.peers: dict[str, Peer] = {name: stage.join(name) for name, stage in self.stages.items()}
        self.attempt = 0

    def run(self, way: str, argv: list[str], cwd: Path) -> tuple[int, str]:
        """Exit code and all output."""
        stage, peer = self.stages[way], self.peers[way]
        self.attempt += 1
        stage.launch(peer, self.attempt, argv=argv, cwd=str(cwd))
        done = stage.until(lambda: peer.of(m.Exit, attempt=self.attempt))[0]
        (launched,) = peer.of(m.Launched, attempt=self.attempt)
        assert launched.warm is (way == "warm"), launched.reason
        return done.code, stage.log(self.attempt)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    base = tmp_path_factory.mktemp("ways")
    patient = {"limits": {"agent_silence_s": 500, "node_silence_s": 600, "orphan_s": 600}}  # only one is served at a time
    with (
        Stage(base / "warm", preload=["multiprocessing.pool"], **patient) as warm,
        Stage(base / "cold", warm=False, **patient) as cold,
    ):
        yield Ways(warm, cold)


@pytest.fixture(autouse=True)
def _signals_as_in_a_job() -> Iterator[None]:
    """Ranks begin with Python's own handlers wherever they are; these tests may run under nohup, or in the background.

    An interpreter inherits that SIGHUP is ignored then, or SIGINT and SIGQUIT.
    """
    own = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_no_difference(name: str, ways: Ways, tmp_path: Path) -> None:
    files, words = PROGRAMS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    argv = [sys.executable, *words]
    with open(tmp_path / "plain.log", "w") as log:
        code = subprocess.run(
            argv, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120, check=False
        ).returncode
    plain = (code, (tmp_path / "plain.log").read_text())
    assert ways.run("warm", argv, tmp_path) == plain
    assert ways.run("cold", argv, tmp_path) == plain


def test_flags_of_the_interpreter_are_honoured(tmp_path: Path) -> None:
    argv = [sys.executable, "-uO", "-X", "dev", "-W", "error", "prog.py"]
    with Stage(tmp_path / "run", argv=argv) as stage:
        (tmp_path / "prog.py").write_text(
            "import sys; print(sys.flags, sys.warnoptions, sys.stdout.write_through)\nassert False"
        )
        peer = stage.join()
        stage.launch(peer, 1, cwd=str(tmp_path))
        done = stage.until(lambda: peer.of(m.Exit))[0]
        assert peer.of(m.Launched)[0].warm
        plain = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
        assert (done.code, stage.log(1)) == (0, plain.stdout)


def test_a_source_edited_between_two_attempts_runs_as_edited(ways: Ways, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text("import lib; print(lib.x)")
    for way in ("warm", "cold"):
        for text in ("x = 1", "x = 'two'"):
            (tmp_path / "lib.py").write_text(text)
            code, log = ways.run(way, [sys.executable, "prog.py"], tmp_path)
            assert (code, log.strip()) == (0, text[4:].strip("'"))


def test_forked_ranks_have_entropy_of_their_own(ways: Ways, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(
        "import random, multiprocessing.process as p, uuid\n"
        "print(random.random(), p.current_process().authkey.hex(), uuid.uuid4())"
    )
    first, second = (ways.run("warm", [sys.executable, "prog.py"], tmp_path)[1].split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]
