#!/usr/bin/env bash
# Sets up everything, then trains SmolLM2-135M-Instruct with GRPO on this machine's CPU.
# Arguments go to the training command, e.g.: bash scripts/quickstart.sh --run.seed 2
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env "tensorboard,gguf"
"$VENV/bin/python" scripts/fetch_smollm2.py --out models/SmolLM2-135M-Instruct
exec "$VENV/bin/grpo-jax" train configs/quickstart.yaml "$@"
