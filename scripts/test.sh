#!/usr/bin/env bash
# Sets up everything, then checks the style, the layers and the types, and runs the tests.
# Arguments go to pytest, e.g.: bash scripts/test.sh -k losses
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
VENV=${VENV:-.venv-test}
setup_env "tensorboard,gguf,datasets,torch,serve,dev"
"$VENV/bin/python" scripts/fetch_smollm2.py --out models/SmolLM2-135M-Instruct
export PATH="$VENV/bin:$PATH"
ruff format --check .
ruff check .
pyright
lint-imports
exec python -m pytest -n 2 --dist loadfile "$@"
