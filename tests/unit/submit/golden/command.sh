#!/bin/bash

# Parameters
#SBATCH --comment=resilient
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --job-name=train
#SBATCH --no-kill
#SBATCH --nodes=2-4
#SBATCH --open-mode=append
#SBATCH --output='/lab/it'"'"'s ü;%%/train-1/logs/job-%j.out'
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=720

# ---- settings ----------------------------------------------------------------------------------------------------
run_dir='/lab/it'"'"'s ü;%/train-1'
resilience=(/venv/bin/python -m slurm_resilience)
options=(--config '/lab/it'"'"'s ü;%/train-1/config.yaml')
command=(python train.py --name 'a b'"'"'c')
export RESILIENCE_SIGNAL_LEAD_S=90

# ---- body --------------------------------------------------------------------------------------------------------
set -euo pipefail

# Slurm's copy of this file, to be queued again where Slurm does not let the job come back.
export RESILIENCE_BATCH_SCRIPT=$0
# A supervisor that has no scontrol, in a container say, asks this shell to put the job back, by a file.
export RESILIENCE_REQUEUE_WISH=
if command -v scontrol > /dev/null; then RESILIENCE_REQUEUE_WISH=$PWD/.resilience-requeue-${SLURM_JOB_ID:-0}; fi

[[ -z $run_dir ]] || options=(--run-dir "$run_dir" ${options[@]+"${options[@]}"})

# Slurm signals everything in the job.  The warning is for the agents and the supervisor, who handle it; this shell must
# outlive it, or nobody would be left to start the supervisor again, and Slurm would take the job for finished.
trap '' TERM CONT USR1 USR2

# The supervisor ends with a code of the documented table, which becomes the job's.  128 and more means that a signal
# killed it: then it is started again, with more patience each time, and picks up where it was.
most_deaths=8 deaths=0
while true; do
  started=$SECONDS code=0
  "${resilience[@]}" run ${options[@]+"${options[@]}"} -- "${command[@]}" || code=$?
  ((code < 128)) && break
  ((SECONDS - started > 600)) && deaths=0
  deaths=$((deaths + 1))
  echo "resilient: the supervisor was killed (code $code), death $deaths of $most_deaths in a row" >&2
  ((deaths >= most_deaths)) && break
  # The first restart comes at once: every second here is a second without training.
  ((deaths > 1)) && sleep $((2 ** (deaths - 1)))
done

if [[ $code == 75 && -n $RESILIENCE_REQUEUE_WISH && -e $RESILIENCE_REQUEUE_WISH ]]; then
  rm -f -- "$RESILIENCE_REQUEUE_WISH"
  job=$SLURM_JOB_ID
  [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # Slurm holds no job that was cancelled; a requeue would bring it back to life.
  if scontrol hold "$job"; then
    scontrol requeue "$job" || true # in the queue already
    scontrol update "JobId=$job" StartTime=now+4 || true
    for _ in 1 2 3 4 5; do
      scontrol release "$job" && break
      sleep 2
    done
  else
    code=86
  fi
fi
exit "$code"
