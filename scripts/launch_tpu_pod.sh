#!/usr/bin/env bash
# Runs one command of this repository on every host of a Cloud TPU slice: all hosts of a slice are
# processes of one job, and find each other by Cloud TPU's own variables.
#
#   TPU=my-slice ZONE=us-west4-a PROJECT=my-project bash scripts/launch_tpu_pod.sh \
#       train configs/my.yaml --run.dir gs-mounted/runs/first
#
# The repository and the run folder must be at the same path on every host (a shared file system, or
# a mounted bucket for the run folder). DRY_RUN=1 prints the command and runs nothing.
# RESTARTS=n starts again up to n times after a preemption (exit status 75).
set -euo pipefail

usage() { sed -n '2,12p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
[[ $# -ge 2 ]] || usage
for name in TPU ZONE PROJECT; do
  [[ -n "${!name:-}" ]] || { echo "launch_tpu_pod.sh: set $name" >&2; usage; }
done
folder="${FOLDER:-$(cd "$(dirname "$0")/.." && pwd)}"
python="${PYTHON:-$folder/.venv/bin/python}"

quoted=""
for word in "$@"; do quoted+=" $(printf '%q' "$word")"; done
remote="cd $(printf '%q' "$folder") && exec $(printf '%q' "$python") -m grpo_jax$quoted"
command=(gcloud compute tpus tpu-vm ssh "$TPU" --project "$PROJECT" --zone "$ZONE" \
  --worker all --command "$remote")

if [[ "${DRY_RUN:-0}" == 1 ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
left="${RESTARTS:-0}"
while true; do
  status=0
  "${command[@]}" || status=$?
  [[ $status == 75 && $left -gt 0 ]] || exit "$status"
  left=$((left - 1))
  echo "launch_tpu_pod.sh: preempted after a save; starting again ($left more)" >&2
done
