#!/usr/bin/env bash
# Sets up all that the tests need on a fresh Debian or Ubuntu machine, then runs them.
#
#   bash tests/run.sh [--long] [pytest arguments]
#
# Without arguments: everything but the tests marked `long`. What this machine cannot do is listed at the end as
# "not run: why"; with CI=true that is a failure.
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
if ((${#missing[@]})) && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt_install "${missing[@]}"
fi
cd -- "$tree"
exec "$python" -m pytest "$@"
