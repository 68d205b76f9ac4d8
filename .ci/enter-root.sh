#!/usr/bin/env bash
# Started by other-slurm.sh in mount and process namespaces of its own: makes the folder $1 the root, and runs a command there.
#
#   enter-root.sh ROOT TREE BINDS COMMAND…      BINDS: what is this machine's, one path a line
set -euo pipefail
root=$1 tree=$2 binds=$3
shift 3

# The root itself must be a mount: a namespace that is made from this one starts at its root mount, wherever chroot(2) points.
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
# Of its own and empty, but on the disk: a run's folder in a tmpfs would be taken for one that nodes do not share.
scratch=$(mktemp -d "$root/var/tmp.XXXXXX")
chmod 1777 "$scratch"
mount --bind "$scratch" "$root/tmp"
while IFS= read -r path; do
  [ -e "$path" ] || continue
  if [ -d "$path" ]; then
    mkdir -p "$root$path"
  elif [ ! -e "$root$path" ]; then
    mkdir -p "$root$(dirname -- "$path")"
    rm -f "$root$path"
    touch "$root$path"
  fi
  mount --rbind "$path" "$root$path"
done <<<"$binds
$tree"
for name in hosts resolv.conf; do cp -L "/etc/$name" "$root/etc/$name"; done
grep -qsw localhost "$root/etc/hosts" || printf '127.0.0.1 localhost\n' >>"$root/etc/hosts"
cd -- "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
cd -- "$tree"
# Not exec: process 1 has to bury what others leave behind, which this shell does while it waits.
code=0
"$@" || code=$?
umount -l /tmp
rm -rf -- "${scratch#"$root"}"
exit "$code"
