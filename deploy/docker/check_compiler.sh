#!/bin/sh
# check_compiler.sh WHO [COMPILER]: end with 1 and say what WHO lacks, unless a module of Python's can be compiled and
# linked here, with COMPILER or else with gcc or clang.
# In a build stage, and in the image of the CUDA worker, whose Triton does just that as soon as it meets a GPU.
set -eu
compiler=
for name in ${2:-gcc clang}; do
    compiler=$(command -v "$name") && break
done
[ -n "$compiler" ] || { echo "$1 has no C compiler (${2:-gcc or clang})" >&2; exit 1; }
# The scheme that Triton asks for; Debian's own default names a directory that need not be there.
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
echo '#include <Python.h>' >"$made/module.c"
"$compiler" -shared -fPIC -I "$headers" "$made/module.c" -o "$made/module.so" ||
    { echo "$1 cannot compile for Python: $compiler is there, but not Python's headers or the C library's" >&2; exit 1; }
