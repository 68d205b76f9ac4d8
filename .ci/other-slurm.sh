# shellcheck shell=bash
# Runs the tests on the Slurm of another Debian release. Sourced by tests/run.sh, after .ci/setup.sh.
#
#   other_slurm VERSION TREE PYTHON COMMAND…
#
# Makes a root folder of that release (debootstrap, under a minute; kept), binds the project and this machine's interpreter
# with all its packages into it, and runs the command there. Slurm, munge, MariaDB, the shell and the C library are that
# release's. It has its own process table, mounts, /tmp and users; all that it started ends with it.

# What Slurm each release of Debian brings. Source: https://packages.debian.org/slurm-wlm
slurm_suite() {
  case $1 in
    22.05) printf 'bookworm\n' ;;
    24.11) printf 'trixie\n' ;;
    *)
      say "--slurm $1: no release of Debian brings that one; 22.05 (Debian 12) and 24.11 (Debian 13) can be had"
      return 64
      ;;
  esac
}

# The archive that apt itself uses for Debian's own packages, or SLURM_RESILIENCE_MIRROR.
debian_mirror() {
  local found
  # shellcheck disable=SC2016  # apt-get fills these in
  found=${SLURM_RESILIENCE_MIRROR:-$(apt-get indextargets --format '$(ORIGIN) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    sed -n '/security/d; s/^Debian main //p' | head -n 1)}
  if [ -z "$found" ]; then
    say "apt's sources name no archive of Debian; SLURM_RESILIENCE_MIRROR=http://… names one"
    return 1
  fi
  printf '%s\n' "$found"
}

# e2fsprogs has the tests' chattr
SLURM_PACKAGES=slurmctld,slurmd,slurm-client,munge,slurmdbd,mariadb-server,iproute2,strace,procps,passwd,e2fsprogs
# what the interpreter of another release is linked against
PYTHON_PACKAGES=libexpat1,libffi8,libsqlite3-0,libncursesw6,ca-certificates

# Makes $2 a root of the release $1 with the packages $3, once; and again when it has to hold others.
make_root() {
  local suite=$1 root=$2 packages=$3 mirror
  [ "$(cat "$root/.ready" 2>/dev/null)" != "$packages" ] || return 0
  command -v debootstrap >/dev/null || apt_install debootstrap
  mirror=$(debian_mirror)
  say "making a root of Debian's $suite in $root"
  rm -rf "$root.new" "$root"
  mkdir -p "$(dirname -- "$root")"
  if ! debootstrap --variant=minbase --include="$packages" "$suite" "$root.new" "$mirror" >"$root.log" 2>&1; then
    tail -n 5 "$root.log" >&2
    say "debootstrap failed; all that it said is in $root.log"
    return 1
  fi
  rm -rf "$root.new/var/cache/apt/archives"
  printf '%s\n' "$packages" >"$root.new/.ready"
  mv "$root.new" "$root"
}

other_slurm() {
  local version=$1 tree=$2 python=$3 suite root base binds
  shift 3
  suite=$(slurm_suite "$version") || return
  if [ "$(id -u)" != 0 ]; then
    say "--slurm needs root: it mounts a root folder of another release"
    return 1
  fi
  base=/opt/slurm-resilience
  root=$base/roots/$suite
  mkdir -p "$base/roots"
  exec 9>"$base/roots/.$suite.lock"
  flock 9
  make_root "$suite" "$root" "$SLURM_PACKAGES,$PYTHON_PACKAGES" || return
  exec 9>&-
  # The interpreter by each name that leads to it, its library, its packages, the project.
  binds=$("$python" -c '
import os, sys, sysconfig
name, names = sys.executable, []
while os.path.islink(name):
    name = os.path.join(os.path.dirname(name), os.readlink(name))
    names.append(name)
base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
libraries = {sysconfig.get_path(one, vars=base) for one in ("stdlib", "platstdlib")}
libraries.add("/etc/python%d.%d" % sys.version_info[:2])  # where Debian has the sitecustomize.py that its library links to
print(*(one for one in names if not one.startswith(sys.prefix + os.sep)), os.path.realpath(name), *libraries, sys.prefix, sep="\n")
')
  # A process table of its own: what is left of a killed run goes with it, and nobody else is there to be hurt.
  # What sets itself up in there (the demo does) takes these packages, whatever other environments this machine has.
  SLURM_RESILIENCE_VENV=$(dirname -- "$(dirname -- "$python")") exec unshare --mount --pid --fork --kill-child --propagation private \
    bash "$tree/.ci/enter-root.sh" "$root" "$tree" "$binds" "$@"
}
