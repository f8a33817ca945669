#!/bin/bash
# Two to four hosts of four ranks each, over the cluster's MPI: sbatch slurm.sh
#
# A step is 48 micro-batches of one row, whatever hosts Slurm gives the job: 8, 12 and 16
# ranks divide it, and all end in the same parameters.
#
#SBATCH --job-name=spillway
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the limit, and when it is preempted, the ranks get SIGTERM: they
# save and end with 130.
#SBATCH --signal=TERM@300

# `srun --mpi=list` shows what the cluster has: pmix for Open MPI, pmi2 for MPICH.
srun --mpi="${SPILLWAY_PMI:-pmix}" --kill-on-bad-exit=0 spillway train \
  --model gpt2-xl --data /data/tokens.bin --steps 10000 \
  --reproducible --batch 1 --global-batch 48 \
  --checkpoint /runs/gpt2-xl --save-every 100 --resume
status=$?

case $status in
0) exit 0 ;;
# Interrupted after saving (130), or a rank was lost (3): again, from the newest
# checkpoint and over the hosts that there are then, at most five times. A divergence is
# 3 too: the next start refuses its settings with 1, and ends the job.
3 | 130)
  if [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit $status
  ;;
# Bad input (1), does not fit or a damaged checkpoint (2): a person has to look.
*) exit $status ;;
esac
