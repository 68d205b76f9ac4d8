#!/usr/bin/env bash
# Sets up all that the tests need on a fresh Debian or Ubuntu machine, then runs them.
#
#   bash tests/run.sh [--slurm VERSION] [--long] [pytest arguments]
#
# Without arguments: everything but the tests marked `long`. What this machine cannot do is listed at the end as
# "not run: why"; with CI=true that is a failure. --slurm 24.11 runs them on the Slurm of Debian 13, in a root folder that
# debootstrap makes; without it they run on the Slurm of this machine.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=.ci/setup.sh
. "$here/.ci/setup.sh"
python='' tree='' # set_up sets them
set_up "$here"
# What tests use besides Slurm, which the sandbox installs by itself. Without root they are listed as not run.
missing=()
command -v strace >/dev/null || missing+=(strace)
command -v ip >/dev/null || missing+=(iproute2)
command -v chromium >/dev/null || missing+=(chromium)
for argument; do
  [ "$argument" = --long ] || continue
  command -v ch-run >/dev/null || missing+=(charliecloud)
  [ -e /etc/profile.d/modules.sh ] || missing+=(environment-modules)
done
if ((${#missing[@]})) && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt_install "${missing[@]}"
fi
if [ "${1:-}" = --slurm ]; then
  version=${2:?--slurm takes a version, such as 24.11}
  shift 2
  # shellcheck source=.ci/other-slurm.sh
  . "$here/.ci/other-slurm.sh"
  other_slurm "$version" "$tree" "$python" "$python" -m pytest "$@"
fi
cd -- "$tree"
# All of it in two processes; with a file named or a word to choose by, in one.
streams=(-n 2 --dist loadgroup --no-loadscope-reorder)
for argument; do
  case $argument in -n* | --dist* | --pdb | [!-]*) streams=() ;; esac
done
exec "$python" -m pytest ${streams[@]+"${streams[@]}"} "$@"
