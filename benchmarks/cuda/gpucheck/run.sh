#!/bin/sh
# Runs everything that a GPU is needed for and writes results/results.json and
# results/results.md. Wants Linux on x86-64, NVIDIA's driver, NVRTC and cuBLASLt
# (a toolkit, a distribution's packages, a Python environment's nvidia/*/lib, or
# folders in SPILLWAY_CUDA_LIBS); no Go. Flags: see ./gpucheck -help.
cd "$(dirname "$0")" && exec ./gpucheck "$@"
