# shellcheck shell=bash
# Makes this machine able to run the project: sourced by tests/run.sh, examples/demo.sh and .ci/run.
#
#   set_up CHECKOUT      sets  tree    where the project's files are, readable by every user of the machine
#                              python  an interpreter, runnable by every user, with the project and its tools installed
#
# Quick when all is there: two stamps, one of what the dependencies were made from, one of which checkout is installed.
# A checkout never takes the environment of another one that still exists: it gets one of its own beside it.
# SLURM_RESILIENCE_VENV names another place for the virtual environment.

say() { printf '%s\n' "setup: $*" >&2; }

# Packages must not start daemons while they are installed: the tests start their own, elsewhere, as they need them.
apt_install() {
  local policy=/usr/sbin/policy-rc.d kept=
  say "installing $*"
  if [ -e "$policy" ]; then kept=$(mktemp) && cp -p "$policy" "$kept"; fi
  printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
  local rc=0
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
    </dev/null >/dev/null || rc=$?
  if [ -n "$kept" ]; then cp -p "$kept" "$policy" && rm -f "$kept"; else rm -f "$policy"; fi
  return $rc
}

# The interpreter of the machine, not one under somebody's home: an ordinary user could not run that.
system_python() {
  local candidate
  for candidate in /usr/bin/python3 /usr/local/bin/python3; do
    if [ -x "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  # an ordinary user may use whatever Python is on the path: nobody else has to
  if [ "$(id -u)" != 0 ] && candidate=$(command -v python3) &&
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    printf '%s\n' "$candidate"
    return 0
  fi
  return 1
}

readable_by_all() {
  setpriv --reuid=65534 --regid=65534 --clear-groups -- test -r "$1/pyproject.toml" 2>/dev/null
}

# A checkout that others cannot read (under a home of mode 0700, say) is copied to where they can.
mirror() {
  local from=$1 to=$2
  rm -rf "$to.new"
  mkdir -p "$to.new"
  if git -c safe.directory="$from" -C "$from" rev-parse --git-dir >/dev/null 2>&1; then
    git -c safe.directory="$from" -C "$from" ls-files -z --cached --others --exclude-standard |
      (cd "$from" && while IFS= read -r -d '' name; do [ ! -e "$name" ] || printf '%s\0' "$name"; done) |
      tar -C "$from" --null -T - -cf - | tar -C "$to.new" --no-same-owner -xf -
  else
    tar -C "$from" --exclude=.git --exclude=.venv --exclude='__pycache__' -cf - . | tar -C "$to.new" --no-same-owner -xf -
  fi
  chmod -R a+rX "$to.new"
  rm -rf "$to"
  mv "$to.new" "$to"
}

set_up() {
  local checkout base venv system deps where digest
  checkout=$(cd -- "$1" && pwd -P)
  umask 022
  if [ "$(id -u)" = 0 ]; then base=/opt/slurm-resilience; else base=$checkout; fi
  mkdir -p "$base"

  # One at a time: two test runs on one machine share the environment.
  exec 9>"$base/.setup.lock"
  flock 9

  tree=$checkout
  digest=$(printf '%s' "$checkout" | sha256sum | cut -c1-12)
  if [ "$(id -u)" = 0 ] && ! readable_by_all "$checkout"; then
    tree=$base/trees/$digest
    mkdir -p "$base/trees"
    mirror "$checkout" "$tree"
    say "other users cannot read $checkout: working in a copy, $tree"
  fi

  if [ "$base" = "$checkout" ]; then venv=$base/.venv; else venv=$base/venv; fi
  where=$(cat "$venv/.stamp-tree" 2>/dev/null) || where=
  if [ -n "$where" ] && [ "$where" != "$tree" ] && [ -e "$where/pyproject.toml" ]; then venv=$base/venv-$digest; fi
  venv=${SLURM_RESILIENCE_VENV:-$venv}
  mkdir -p "$(dirname -- "$venv")"

  system=$(system_python) || system=
  if [ -z "$system" ] || ! "$system" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
      say "Python 3.10 or newer with venv is needed; found: ${system:-none}. Install python3 and python3-venv, or run this as root on Debian or Ubuntu."
      return 1
    fi
    apt_install python3 python3-venv
    system=$(system_python) || { say "this release's own Python is older than 3.10"; return 1; }
  fi

  python=$venv/bin/python
  deps=$({ "$system" -V; cat "$tree/pyproject.toml" "$tree/.ci/constraints.txt"; } | sha256sum | cut -c1-32)
  if [ "$(cat "$venv/.stamp-deps" 2>/dev/null)" != "$deps" ] || ! "$python" -c '' 2>/dev/null; then
    say "making the virtual environment $venv (minutes when torch has to be fetched)"
    "$python" -c '' 2>/dev/null || { rm -rf "$venv" && "$system" -m venv "$venv"; }
    rm -f "$venv/.stamp-tree"
    # torch first and by itself, so that nothing else pulls another build in
    "$python" -m pip install -q --disable-pip-version-check -c "$tree/.ci/constraints.txt" torch
    "$python" -m pip install -q --disable-pip-version-check -c "$tree/.ci/constraints.txt" hatchling editables
    (cd -- "$tree" && "$python" -m pip install -q --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]')
    printf '%s\n' "$tree" >"$venv/.stamp-tree"
    printf '%s\n' "$deps" >"$venv/.stamp-deps"
  fi
  where=$(cat "$venv/.stamp-tree" 2>/dev/null) || where=
  if [ "$where" != "$tree" ]; then
    say "installing $tree into $venv"
    "$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e "$tree"
    printf '%s\n' "$tree" >"$venv/.stamp-tree"
  fi
  exec 9>&-
}
