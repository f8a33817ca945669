#!/bin/bash
# llama-3-8b on 16 × h100-80, as spillway plan has planned it: a rank takes 29.08
# GiB of 79.65 GiB of device memory and 330.21 MiB of host memory, a step 320–580
# ms, 110,000–210,000 tokens/s.
# Check the paths: all hosts see the same data, model and checkpoint folder. A cluster may ask for
# --partition and --account too.
#SBATCH --job-name=spillway
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
# Memory of a server: what its ranks take by the plan, and an eighth and 64 MiB more.
#SBATCH --mem=3035M
# The predicted time at its longest, a quarter and half an hour more.
#SBATCH --time=0-04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the limit, and when it is preempted, the ranks get SIGTERM: they save and end
# with 130.
#SBATCH --signal=TERM@300

# `srun --mpi=list` shows what the cluster has: pmix for Open MPI, pmi2 for MPICH.
srun --mpi="${SPILLWAY_PMI:-pmix}" --kill-on-bad-exit=0 spillway train \
  --batch 1 \
  --model llama-3-8b \
  --precision bf16 \
  --seq 4096 \
  --device cuda \
  --data /data/tokens.bin \
  --zero 3 \
  --prefetch 2 \
  --recompute none \
  --offload none \
  --steps 15259 \
  --checkpoint /runs/llama-3-8b \
  --save-every 100 \
  --resume
status=$?

case $status in
# Interrupted after saving (130), or a rank was lost (3): again, from the newest checkpoint, at most
# five times. A divergence is 3 too: the next start refuses its settings with 1, and ends the job.
3 | 130)
  if [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  ;;
esac
# 0: done. 1 and 2: bad input; does not fit, or a damaged checkpoint: a person has to look.
exit $status
