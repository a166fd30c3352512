#!/usr/bin/env bash
# Supervised fine-tuning on 8 GPUs.
# Flags given to this script come last and win, for example: bash examples/scripts/train_sft.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B}
DATA=${DATA:-Open-Orca/OpenOrca}
OUTPUT=${OUTPUT:-./exp/llama3-8b-sft}
GPUS=${GPUS:-8}

exec torchrun --nproc-per-node "$GPUS" -m openrlhf.cli.train_sft \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.input_key question \
   --data.output_key response \
   --data.input_template $'User: {}\nAssistant: ' \
   --data.max_len 2048 \
   --train.batch_size 256 \
   --train.micro_batch_size 2 \
   --train.max_epochs 1 \
   --ds.zero_stage 2 \
   --ds.packing_samples \
   --model.gradient_checkpointing_enable \
   --adam.lr 5e-6 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
