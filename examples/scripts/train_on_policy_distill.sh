#!/usr/bin/env bash
# On-policy distillation of a small model from a larger one, on 8 GPUs: 2 for the policy, 2 for the teacher, 4 engines.
# Flags given to this script come last and win, for example: bash examples/scripts/train_on_policy_distill.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-Qwen/Qwen3-1.7B}
TEACHER=${TEACHER:-Qwen/Qwen3-8B}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/qwen3-1.7b-distilled}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --ref.model_name_or_path "$TEACHER" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.apply_chat_template \
   --data.max_len 4096 \
   --rollout.max_new_tokens 3072 \
   \
   --actor.num_gpus_per_node 2 \
   --ref.num_gpus_per_node 2 \
   --vllm.num_engines 4 \
   \
   --algo.advantage.estimator on_policy_distill \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 4 \
   --train.batch_size 128 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 16384 \
   \
   --ds.zero_stage 3 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 2e-6 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
