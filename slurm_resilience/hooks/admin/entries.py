"""The scripts that Slurm is pointed at: text in, text out."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.errors import ConfigError

# what slurm.conf calls it -> what we call it
KINDS = {"Prolog": "prolog", "Epilog": "epilog", "HealthCheckProgram": "healthcheck", "EpilogSlurmctld": "epilogslurmctld"}
# How long the shell waits for our program: a little longer than it gives itself (main.DEADLINES_S)
DEADLINES_S = {"prolog": 8, "epilog": 10, "healthcheck": 50, "epilogslurmctld": 6}
PACKAGE = "slurm_resilience_node"


@dataclass(frozen=True)
class Places:
    """Where the installation is, as the node sees it."""

    prefix: Path
    config: Path
    state: Path
    python: Path

    @property
    def library(self) -> Path:
        return self.prefix / "lib" / PACKAGE

    @property
    def compiled(self) -> Path:
        return self.config.with_suffix(".json")

    def entry(self, kind: str) -> Path:
        return self.prefix / "bin" / kind


def controller_state(places: Places) -> Path:
    """Beside the nodes' state: it belongs to SlurmUser."""
    return places.state.with_name(places.state.name + "-controller")


def shipped(name: str) -> str:
    """A file of ``sbatch/hooks`` as shipped: in the wheel, or in the checkout."""
    here = Path(__file__).resolve()
    for path in (here.parents[2] / "_sbatch" / "hooks" / name, here.parents[3] / "sbatch" / "hooks" / name):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise ConfigError(f"{name} is not part of this installation", remedy="reinstall slurm-resilience")


def entry(places: Places, kind: str, chained: str) -> str:
    """The entry for one kind of hook, in front of (or behind) the script that the site had there before."""
    values = {
        "CONTEXT": kind, "PYTHON": str(places.python), "START": str(places.library / "start.py"),
        "CONFIG": str(places.compiled), "DEADLINE_S": str(DEADLINES_S[kind]), "CHAINED": chained,
        "STATE": str(controller_state(places) if kind == "epilogslurmctld" else places.state),
    }  # fmt: skip
    text = shipped("hook.sh")
    for name, value in values.items():
        if "'" in value or "\n" in value:
            raise ConfigError(f"{value!r} cannot stand in a shell script", remedy="use a path without quotes and newlines")
        text = text.replace(f"@{name}@", value)
    return text


def chain_of(pattern: str) -> str:
    """What Slurm does with a pattern such as /etc/slurm/prolog.d/*: last name first, until one fails.

    A README among them, which would drain the node, is passed over.  Source: slurmd, run_script of 22.05; tried.
    """
    folder, _, name = pattern.rpartition("/")
    return f"""#!/bin/sh
# Written by `slurm-resilience hooks install`: runs {shlex.quote(pattern)} as Slurm does.
set -- {shlex.quote(folder)}/{name}
while [ "$#" -gt 0 ]; do
    eval "script=\\${{$#}}"
    if [ -f "$script" ] && [ -x "$script" ]; then "$script" || exit; fi
    # drop the last argument
    count=$(($# - 1)); rest=
    i=1; while [ "$i" -le "$count" ]; do rest="$rest \\"\\${{$i}}\\""; i=$((i + 1)); done
    eval "set -- $rest"
done
exit 0
"""
