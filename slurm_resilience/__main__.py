"""``python -m slurm_resilience`` is the ``slurm-resilience`` command."""

from slurm_resilience.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
