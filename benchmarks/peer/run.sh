#!/usr/bin/env bash
# Step time of the peer (TRL's GRPOTrainer) on the quickstart's model and prompts.
# usage: benchmarks/peer/run.sh MODEL_FOLDER TRAIN_JSONL [ROLLOUT_STEPS]
# Its environment is its own: $PEER_VENV, by default .venv-peer in the repository (not tracked), made on the first run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${PEER_VENV:-$here/../../.venv-peer}
model=${1:?"usage: run.sh MODEL_FOLDER TRAIN_JSONL [ROLLOUT_STEPS]"}
data=${2:?"usage: run.sh MODEL_FOLDER TRAIN_JSONL [ROLLOUT_STEPS]"}
if [ ! -e "$venv/complete" ]; then
    "${PYTHON:-python3.11}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "trl==1.16.0" "torch==2.13.0" "transformers<5.20" >&2
    touch "$venv/complete"
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" "$here/grpo.py" "$model" "$data" "${3:-40}"
