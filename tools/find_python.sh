#!/bin/sh
# Print the Python that `make` sets up with, unless PYTHON names one: `python3`, or the system's if `python3` is slow.
#
# What distributions, conda and python.org ship is built with profile-guided optimisation; pyenv builds without, unless
# told otherwise, and the services then take a fifth more processor time (docs/benchmarks.md). Debian builds it so
# without the flag that others show, so that its own is known by where it lies. The system's Python is
# taken only if it can do all that is needed: a tested version, with venv, and with headers for `make compiled`.
set -u

optimised() {
    "$1" -c 'import sys, sysconfig; sys.exit(sys.base_prefix != "/usr" and "--enable-optimizations" not in (sysconfig.get_config_var("CONFIG_ARGS") or ""))' 2>/dev/null
}

complete() {
    "$1" - 2>/dev/null <<'CHECK'
import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and os.path.exists(headers)))
CHECK
}

SYSTEM=${SYSTEM_PYTHON:-/usr/bin/python3}
if ! optimised python3 && [ -x "$SYSTEM" ] && complete "$SYSTEM"; then
    echo "$SYSTEM"
else
    echo python3
fi
