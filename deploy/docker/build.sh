#!/bin/sh
# build.sh IMAGE...: build penstock/IMAGE:VERSION and :latest from dist/ and build/wheels/; `make images` calls it.
# BASE and BUILD_BASE name other base images than the Dockerfiles' own (worker-cuda runs on BUILD_BASE without a BASE),
# SOURCE the address of the source code for the image's label; COMPILE=0 leaves the services interpreted.
set -eu
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
export DOCKER_BUILDKIT=1

for image; do
    base=${BASE:-}
    # Triton compiles at run time, so what has a compiler is what this one runs on.
    if [ "$image" = worker-cuda ]; then base=${BASE:-${BUILD_BASE:-python:3.11-bookworm}}; fi
    case $image in
    worker-cpu | worker-cuda)
        # Where the build's base lacks libnuma1, Debian is asked for it. Not else: to BuildKit a step with a network is
        # another than the same one without, and it would compile anew what is in the light images already.
        file=Dockerfile.worker network='--network none'
        docker run --rm --network none --entrypoint sh "${BUILD_BASE:-python:3.11-bookworm}" \
            -c 'ls /usr/lib/*/libnuma.so.1' >/dev/null 2>&1 || network=''
        ;;
    *) file=Dockerfile network='--network none' ;;
    esac
    docker build --quiet $network --file "deploy/docker/$file" --target "$image" \
        ${base:+--build-arg "BASE=$base"} ${BUILD_BASE:+--build-arg "BUILD_BASE=$BUILD_BASE"} \
        ${COMPILE:+--build-arg "COMPILE=$COMPILE"} --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "SOURCE=${SOURCE:-}" \
        --tag "penstock/$image:$version" --tag "penstock/$image:latest" . >/dev/null
    docker image inspect -f '{{.Size}}' "penstock/$image:$version" |
        awk -v name="penstock/$image:$version" '{ printf "%-32s %6.0f MB\n", name, $1 / 1e6 }'
done
