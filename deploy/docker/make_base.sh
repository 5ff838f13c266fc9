#!/bin/sh
# Make the base images out of Debian packages, for machines that reach Debian but no image registry:
#   penstock/build-base:local   Python, pip and a C compiler: BUILD_BASE of the Dockerfiles, never shipped
#   penstock/base:local         Python and what it needs: BASE of the Dockerfiles
# Needs root, debootstrap and a running Docker daemon. MIRROR names a Debian mirror other than debootstrap's own.
set -eu

SUITE=bookworm
# libnuma1 is for vLLM's CPU build, gcc with the two -dev packages compiles the services; the rest of what wheels need, python3.11 brings.
PACKAGES=ca-certificates,python3.11,python3,python3-pip,python3-distutils,libnuma1,gcc,libc6-dev,python3-dev

# What the services run on. Python loads the libraries; sh and coreutils are for a person who looks inside.
KEEP="base-files base-passwd ca-certificates coreutils dash libacl1 libattr1 libbz2-1.0 libc-bin libc6 libcom-err2
libcrypt1 libdb5.3 libexpat1 libffi8 libgcc-s1 libgmp10 libgssapi-krb5-2 libk5crypto3 libkeyutils1 libkrb5-3
libkrb5support0 liblzma5 libncursesw6 libnsl2 libnuma1 libpcre2-8-0 libpython3.11-minimal libpython3.11-stdlib
libreadline8 libselinux1 libsqlite3-0 libssl3 libstdc++6 libtinfo6 libtirpc3 libuuid1 media-types mime-support
python3.11 python3.11-minimal readline-common tzdata zlib1g"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# mktemp's directory is for its owner alone, and it becomes "/".
chmod 755 "$root"

import() { # import NAME: the tree as an image
    tar --numeric-owner -C "$root" -c . | docker import --change 'ENV LANG=C.UTF-8' - "$1" >/dev/null
    printf '%s %s\n' "$1" "$(docker image inspect -f '{{.Size}}' "$1" | awk '{ printf "%.0f MB", $1 / 1e6 }')"
}

debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "$root" ${MIRROR:+"$MIRROR"} >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; rm -f "$root.log"; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/etc/apt/sources.list*
# debootstrap copies these two from the machine it runs on.
: >"$root/etc/hostname"
: >"$root/etc/resolv.conf"
import penstock/build-base:local

# A package goes with its files, not with its directories, which it shares.
for package in $(chroot "$root" dpkg-query -W -f '${Package}\n'); do
    case " $(echo $KEEP) " in *" $package "*) continue ;; esac
    chroot "$root" dpkg -L "$package" | while IFS= read -r path; do
        if [ -L "$root$path" ] || [ -f "$root$path" ]; then printf '%s\n' "$path"; fi
    done
done >"$root/gone"
# A path through a link of the merged /usr (/bin, /lib) ends at the same file.
while IFS= read -r path; do
    case $path in /bin | /sbin | /lib | /lib64 | /lib32 | /libx32) ;; *) rm -f "$root$path" ;; esac
done <"$root/gone"
rm -rf "$root/gone" "$root"/usr/share/doc "$root"/usr/share/man "$root"/usr/share/locale "$root"/usr/share/info \
    "$root"/usr/share/lintian "$root"/usr/share/perl* "$root"/usr/share/bash-completion "$root"/usr/share/common-licenses/GFDL* \
    "$root"/usr/lib/python3 "$root"/usr/lib/*/gconv "$root"/usr/lib/*/perl* "$root"/var/lib/dpkg "$root"/var/lib/apt \
    "$root"/var/lib/pam "$root"/var/lib/systemd "$root"/var/cache "$root"/etc/apt "$root"/etc/dpkg "$root"/etc/systemd \
    "$root"/etc/pam* "$root"/boot "$root"/media "$root"/srv
find "$root/usr" -name __pycache__ -type d -prune -exec rm -rf {} +
chroot "$root" /usr/bin/python3.11 -m compileall -q /usr/lib/python3.11 >/dev/null || true
ln -sf python3.11 "$root/usr/bin/python3"
chroot "$root" /sbin/ldconfig
import penstock/base:local
