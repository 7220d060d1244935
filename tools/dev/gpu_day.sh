#!/usr/bin/env bash
# Runs everything that waits for a GPU, part by part, in 8 minutes, or 15 with vLLM: see gpu_day.py, or --help.
set -eu
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m tools.dev.gpu_day "$@"
