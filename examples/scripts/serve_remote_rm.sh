#!/usr/bin/env bash
# Serve a reward model over HTTP; trainers reach it with --reward.remote_url http://localhost:5000/get_reward
# Flags given to this script come last and win, for example: bash examples/scripts/serve_remote_rm.sh --port 5001
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-rm-700k}

exec python3 -m openrlhf.cli.serve_rm \
   --reward.model_name_or_path "$MODEL" \
   --port 5000 \
   --ds.param_dtype bf16 \
   --data.max_len 8192 \
   --batch_size 16 \
   "$@"
