"""Where are the batch scripts that we ship: in a checkout ``<root>/sbatch``, in an installed package ``_sbatch``."""

from __future__ import annotations

from pathlib import Path

from slurm_resilience.errors import ConfigError

BATCH_SCRIPT = "resilient.sbatch"


def template_path(name: str = BATCH_SCRIPT) -> Path:
    """The shipped file of that name.  Raises :class:`ConfigError` when the installation has lost it."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "_sbatch" / name, package.parent / "sbatch" / name)
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"The template {name!r} is not there",
        evidence=f"looked at {' and '.join(map(str, places))}",
        remedy="install slurm-resilience again: the wheel carries its templates in slurm_resilience/_sbatch",
    )
