#!/bin/sh
# Make the virtual environment $VENV with $PYTHON: Penstock, vLLM's CPU build, the test tools.
# Called by `make setup`; every version comes from requirements/.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*" >&2; }

"$PYTHON" - <<'CHECK' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"setup: Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}; name another with PYTHON=…")
CHECK

# One whose making was interrupted, or that Debian's python3 without python3-venv began, has a Python and no pip.
if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    say "making the virtual environment $VENV"
    "$PYTHON" -m venv "$VENV" || { say "could not make it; on Debian: apt-get install python3-venv"; exit 1; }
fi

pip_install() {
    # pip warns about every search place that lacks a package; only errors matter here. Byte code is left
    # to the first import: compiling all of it takes as long as unpacking it, and most is never imported.
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "$@" 2>"$VENV/pip.log" ||
        { cat "$VENV/pip.log" >&2; exit 1; }
}

say "installing pinned packages (about 2.5 GB unpacked, mostly torch and vLLM; minutes on a cold cache)"
pip_install --no-deps -r requirements/base.txt -r requirements/worker-cpu.txt -r requirements/dev.txt

# PyPI's own torch is the CUDA build, which cannot be imported without the CUDA packages it depends on.
if ! "$VENV/bin/python" -c 'import torch' 2>"$VENV/torch.log"; then
    say "pip found no CPU build of torch: installing the CUDA build with its packages (several GB)."
    say "To avoid that, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index (pytorch.org, Get Started, CPU) and start again."
    pip_install "torch==$(sed -n 's/^torch==//p' requirements/worker-cpu.txt)"
fi

pip_install --no-deps --no-build-isolation --editable .

say "done"
