"""No child of ours outlives its deadline, floods our memory, or shares our session; a stuck one is left, not waited for."""

import fcntl
import os
import select
import time

from . import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KILL = 9
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
MOST_MEMORY = 1 << 30
LAST_WORDS_S = 0.2  # for output that a grandchild still holds open after its parent has ended


class Finished:
    """How a child ended.  ``code`` is None when it had to be killed or never started; ``problem`` says so in words."""

    def __init__(self, code: "int | None", out: str, err: str, problem: str, cut: bool) -> None:
        self.code = code
        self.out = out
        self.err = err
        self.problem = problem
        self.cut = cut


class Running:
    """A child in a session of its own, with its output pipes."""

    def __init__(self, pid: int, pipes: "list[int]", what: str, started: float) -> None:
        self.pid = pid
        self.pipes = pipes
        self.what = what
        self.started = started

    def finish(self, timeout_s: float, cap_bytes: int = 65536) -> Finished:
        """Its end, at most ``timeout_s`` seconds after its start; of each pipe at most ``cap_bytes`` are kept."""
        texts = [b"" for _ in self.pipes]
        cut, ended = False, False
        deadline = self.started + timeout_s
        poller = select.poll()
        for fd in self.pipes:
            poller.register(fd, select.POLLIN | select.POLLHUP)
        still = set(self.pipes)
        while True:
            if not ended and self._has_ended():
                ended = True
                deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
            now = time.monotonic()
            if now >= deadline or (ended and not still):
                break
            # An ended child shows as end-of-file; one that closed its output is looked for every 5 ms
            wait_ms = (deadline - now) * 1000.0 if still else 5.0
            for fd, _ in poller.poll(max(1.0, min(wait_ms, 50.0))):
                data = os.read(fd, 65536)
                if not data:
                    poller.unregister(fd)
                    still.discard(fd)
                    continue
                index = self.pipes.index(fd)
                room = cap_bytes - len(texts[index])
                cut = cut or len(data) > room
                texts[index] += data[: max(room, 0)]
        problem = ""
        status = None
        if ended:
            # What it left behind in its session.  Only then is it buried: a dead child's number names nobody else's group
            _kill_group(self.pid)
            status = os.waitpid(self.pid, 0)[1]
        else:
            status, stuck = self._kill()
            problem = f"no answer within {timeout_s:g} s" + (", and it cannot be killed" if stuck else "")
        for fd in self.pipes:
            os.close(fd)
        words = [text.decode("utf-8", "replace") for text in texts] + [""]
        return Finished(None if problem else exit_code(status or 0), words[0], words[1], problem, cut)

    def _has_ended(self) -> bool:
        """Seen and not buried yet."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill(self) -> "tuple[int | None, bool]":
        _kill_group(self.pid)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            done, raw = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return raw, False
            time.sleep(0.01)
        return None, True  # in uninterruptible sleep: waiting longer would only make two of us hang


def exit_code(status: int) -> int:
    """The code in a wait status; negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def run(argv: "Sequence[str]", timeout_s: float, env: "dict[str, str] | None" = None, cap_bytes: int = 65536) -> Finished:
    """Run one command by its absolute path, without a shell, in an environment made from scratch.  Never raises for it."""
    if not argv[0].startswith("/"):
        return Finished(None, "", "", f"{argv[0]!r} is not an absolute path", False)
    told, telling = os.pipe()  # both ends close at exec; words on it mean that exec failed
    child = start(lambda: _execute(list(argv), env or {"PATH": PATH, "LC_ALL": "C"}, telling), argv[0], pipes=2)
    os.close(telling)
    fcntl.fcntl(told, fcntl.F_SETFL, os.O_NONBLOCK)
    done = child.finish(timeout_s, cap_bytes)
    try:
        said = os.read(told, 500).decode("utf-8", "replace")
    except OSError:
        said = ""
    os.close(told)
    return Finished(None, "", "", f"cannot run {argv[0]}: {said}", False) if said else done


def start(function: "Callable[[], str]", what: str, pipes: int = 1) -> Running:
    """Fork; the child's text comes out of the first pipe.  It sees nothing of our stdin, stdout and stderr."""
    ends = [os.pipe() for _ in range(pipes)]
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for held in files.HELD:
                os.close(held)
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(ends[0][1], 1)
            os.dup2(ends[1][1] if pipes > 1 else null, 2)
            text = function()
            os.write(1, text.encode("utf-8", "replace")[:4096])
        except BaseException as error:  # the parent must hear of it, whatever it was
            os.write(1, f"raised {type(error).__name__}: {error}".encode("utf-8", "replace")[:1000])
            os._exit(70)
        os._exit(0)
    for _, writing in ends:
        os.close(writing)
    return Running(pid, [reading for reading, _ in ends], what, started)


def bound_memory() -> None:
    """A gigabyte more than it has now for this process, whatever it reads: what it lacks is its error, not the node's end."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MOST_MEMORY
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _unbound_memory() -> None:
    """For tools, some of which reserve more addresses than that."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _execute(argv: "list[str]", env: "dict[str, str]", telling: int) -> str:
    try:
        _unbound_memory()
        os.execve(argv[0], argv, env)  # noqa: S606
    except OSError as error:
        os.write(telling, (error.strerror or str(error)).encode())
    os._exit(127)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, KILL)
    except OSError:
        pass  # nobody of it is left
