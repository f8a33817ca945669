#!/bin/sh
# Runs everything that a GPU is needed for, writes results/results.json, results.md and
# logs as it goes, and packs them into results.tar.gz. Wants Linux on x86-64, NVIDIA's
# driver, NVRTC and cuBLASLt (a toolkit, a distribution's packages, a Python
# environment's nvidia/*/lib, or folders in SPILLWAY_CUDA_LIBS); no Go. Flags: see
# ./gpucheck -help.
cd "$(dirname "$0")" || exit 1
./gpucheck "$@"
status=$?
[ ! -d results ] || tar -czf results.tar.gz results
exit $status
