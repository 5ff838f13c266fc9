#!/bin/sh
# compile.sh tools: in a build stage, put what compiles the services into /opt/compile, with the packages they import.
# compile.sh wheel: make wheel/ of the sdist in dist/, compiled unless COMPILE=0.
set -eu
case $1 in
tools)
    python3 -m pip install --quiet --no-deps --target /opt/compile --find-links light --find-links compile \
        -r deploy/docker/packages/compile.txt -r requirements/base.txt
    ;;
wheel)
    # setuptools runs the compiler that Python was built with.
    compiler=$(python3 -c 'import shlex, sysconfig; print(shlex.split(sysconfig.get_config_var("CC") or "gcc")[0])')
    if [ "$COMPILE" != 0 ] && ! sh check_compiler.sh "compile.sh: BUILD_BASE" "$compiler"; then
        echo "compile.sh: name one that has what is missing, or leave the services interpreted with COMPILE=0" >&2
        exit 1
    fi
    PENSTOCK_COMPILE=$COMPILE PYTHONPATH=/opt/compile \
        python3 -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheel dist/penstock-*.tar.gz
    ;;
esac
