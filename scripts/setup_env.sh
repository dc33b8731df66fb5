#!/usr/bin/env bash
# Sourced by the other scripts: makes .venv once, and again whenever pyproject.toml changes.
#   setup_env EXTRAS   e.g. setup_env "tensorboard,gguf"
setup_env() {
  local extras=$1 python=${PYTHON:-} stamp
  if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3; do
      if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
      fi
    done
  fi
  if [ -z "$python" ]; then
    echo "grpo_jax needs Python 3.11 or newer on PATH (or name one: PYTHON=/path/to/python3.11)" >&2
    return 1
  fi
  VENV=${VENV:-.venv}
  stamp="$VENV/.installed"
  local wanted
  wanted="$extras $(cksum <pyproject.toml)"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "setting up $VENV with $("$python" --version) and [$extras] (about a minute or two, once)"
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    echo "$wanted" >"$stamp"
  fi
}
