#!/bin/sh
# Runs everything that a GPU is needed for. After each part, and when it is ended,
# results/results.tar.gz has everything so far. Wants Linux on x86-64 and NVIDIA's driver;
# NVRTC and cuBLASLt (a toolkit, a distribution's packages, a Python environment's
# nvidia/*/lib, or folders in SPILLWAY_CUDA_LIBS) for more than the first contact; no Go.
# Flags: see ./gpucheck -help.
cd "$(dirname "$0")" || exit 1
exec ./gpucheck "$@"
