#!/bin/sh
# install_worker.sh FILE: in a build stage, put the exact versions of FILE and of base.txt into
# /opt/penstock. Byte code is compiled here: without it every start compiles 4,700 modules.
set -eu
install() { python3 -m pip --python /opt/penstock/bin/python3 install --quiet --no-deps "$@"; }
install -r deploy/docker/packages/init.txt -r requirements/base.txt -r "$1"
# Programs that test libtorch. Headers and static libraries stay: where BASE has a compiler, torch.compile and nvcc
# ask for them.
rm -rf /opt/penstock/lib/python3*/site-packages/torch/test /opt/penstock/lib/python3*/site-packages/torch/bin/test_*
# vLLM's CPU build wants libnuma, which a slim base image lacks.
mkdir -p /opt/penstock/lib/system
cp -L /usr/lib/*/libnuma.so.1 /opt/penstock/lib/system/ 2>/dev/null || {
    apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1
    cp -L /usr/lib/*/libnuma.so.1 /opt/penstock/lib/system/
}
