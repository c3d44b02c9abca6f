#!/usr/bin/env bash
# Make .venv from requirements.lock with a Python that really runs: make_venv.sh [VENV_DIR]
# PYTHON=/path/to/python chooses one; otherwise the usual names and pyenv's version folders are tried.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

is_new_enough() { # a pyenv shim is on PATH and yet fails: only running it tells
  "$1" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 python \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python \
      /opt/python*/bin/python3; do
    if is_new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  echo "No Python >= 3.12 with venv found. Install one (Debian/Ubuntu: apt install python3.12 python3.12-venv;" \
       "any system: pyenv install 3.12, or uv python install 3.12), or name it: make PYTHON=/path/to/python3.12" >&2
  exit 1
}

stamp=$venv/.installed
wanted=$(cat requirements.lock setup.py pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

python=$(find_python)
if ! { [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python"; }; then
  echo "Making $venv with $("$python" --version) ($python)"
  "$python" -m venv --clear "$venv"
fi
echo "Installing requirements.lock into $venv (about 5.7 GB and four minutes the first time) ..."
# The lock names every package, so pip has nothing to resolve.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
"$venv/bin/python" -m pip check
echo "$wanted" > "$stamp"
