#!/bin/sh
# install.sh SERVICE: in a build stage, put the packages of packages/SERVICE.txt into /opt/penstock.
# install.sh penstock: put Penstock's wheel there; a step of its own, so that a new one costs seconds.
# Byte code is compiled here, by pip: the services cannot write any on a read-only root.
set -eu
install() { python3 -m pip --python /opt/penstock/bin/python3 install --quiet "$@"; }
case $1 in
penstock)
    install --no-deps dist/penstock-*.whl
    # The command line, in images whose packages it is not among: it is written with typer.
    /opt/penstock/bin/python3 -c 'import typer' 2>/dev/null || rm /opt/penstock/bin/penstock
    ;;
*) install -r deploy/docker/packages/init.txt -r "deploy/docker/packages/$1.txt" ;;
esac
