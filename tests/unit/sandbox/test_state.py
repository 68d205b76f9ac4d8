"""What a sandbox remembers comes back as it was, or is refused; one command at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.errors import FormatError, SandboxError
from slurm_resilience.sandbox.configuration import Cluster
from slurm_resilience.sandbox.layout import Layout
from slurm_resilience.sandbox.state import HostState, State, load, locked


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout("x", root=tmp_path)
    found.dir.mkdir()
    return found


def test_it_comes_back_as_it_was(layout: Layout) -> None:
    assert load(layout) is None
    host = HostState("n1", 12, 345, "id", 1.5, (-7, -8), "/sys/fs/cgroup/x", power=False, cut=True, stopped_before=[3])
    ctl = HostState("ctl", 13, 346, "id2", 1.5, None, None)
    cluster = Cluster(2, accounting=False, settings={"KillWait": "3"})
    state = State("x", cluster, 1.0, "boot", "up", {"n1": host, "ctl": ctl}, {"scontrol": "hang"}, ["/d"])
    state.save(layout)
    assert load(layout) == state


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"v": 99}', '{"v": 1}', '{"v": 1, "hosts": {}, "extra": 1, "cluster": {}}'])
def test_what_another_release_wrote_is_refused_with_the_way_out(layout: Layout, text: str) -> None:
    layout.state_file.write_text(text)
    with pytest.raises(FormatError, match="sandbox down --name x"):
        load(layout)


def test_one_command_at_a_time_and_a_dead_one_holds_nobody_up(layout: Layout) -> None:
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom slurm_resilience.sandbox.layout import Layout\n"
        "from slurm_resilience.sandbox.state import locked\n"
        "with locked(Layout('x', root=Path(sys.argv[1]))):\n    print('held', flush=True)\n    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder, layout.root], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SandboxError, match="Another command"), locked(layout, within_s=0.1):
            pass
        other.kill()
    with locked(layout, within_s=60.0):
        pass
