#!/usr/bin/env bash
# One training job survives a node that loses power, then a preemption, and ends where an undisturbed one would.
#
#   bash examples/demo.sh [--keep] [--local]
#
# On a real Slurm of four nodes on this machine (needs root on Debian or Ubuntu; installs what is missing), or with
# --local, and where there is no root, on four pretend nodes without Slurm. --keep leaves everything up to look at.
#
# Everything it needs goes into a virtual environment: .venv here, or, as root, one below /opt/slurm-resilience, which the
# ordinary user of the sandbox can read. SLURM_RESILIENCE_VENV names another place.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" && exit 0 ;; esac
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=.ci/setup.sh
. "$here/.ci/setup.sh"
python='' tree='' # set_up sets them
set_up "$here"
exec "$python" "$tree/examples/demo/main.py" "$@"
