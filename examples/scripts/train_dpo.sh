#!/usr/bin/env bash
# Direct preference optimisation on 8 GPUs.
# Flags given to this script come last and win, for example: bash examples/scripts/train_dpo.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
OUTPUT=${OUTPUT:-./exp/llama3-8b-dpo}
GPUS=${GPUS:-8}

exec torchrun --nproc-per-node "$GPUS" -m openrlhf.cli.train_dpo \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.chosen_key chosen \
   --data.rejected_key rejected \
   --data.apply_chat_template \
   --data.max_len 8192 \
   --model.beta 0.1 \
   --train.batch_size 256 \
   --train.micro_batch_size 1 \
   --train.max_epochs 1 \
   --ds.zero_stage 3 \
   --ds.packing_samples \
   --model.gradient_checkpointing_enable \
   --adam.lr 5e-7 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
