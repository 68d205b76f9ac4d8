#!/bin/bash
# A stand-in for a container, for machines that have none: a mount namespace in which Slurm's commands and munge's socket
# are not there, made by an ordinary user.
#
#   without_slurm.sh IMAGE COMMAND…     IMAGE: a file, which must be there, as an image would have to be
set -euo pipefail
[[ -r $1 ]] || { echo "without_slurm.sh: no image $1" >&2; exit 125; }
shift
# shellcheck disable=SC2016  # the inner shell's own
exec unshare --user --map-current-user --keep-caps --mount bash -c '
  for name in scontrol squeue sacct sinfo sbatch srun scancel; do
    where=$(command -v "$name") && mount --bind /dev/null "$(readlink -f "$where")"
  done
  if scontrol --version 2> /dev/null; then exit 125; fi
  exec "$@"' inside "$@"
