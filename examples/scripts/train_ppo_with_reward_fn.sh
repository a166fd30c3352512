#!/usr/bin/env bash
# PPO with rewards from a Python function, on 8 GPUs.
# Flags given to this script come last and win, for example: bash examples/scripts/train_ppo_with_reward_fn.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD=${REWARD:-examples/python/math_reward_func.py}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/llama3-8b-reward-function}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --reward.remote_url "$REWARD" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 3072 \
   --rollout.max_new_tokens 2048 \
   \
   --train.colocate_all \
   --actor.num_gpus_per_node 8 \
   --critic.num_gpus_per_node 8 \
   --ref.num_gpus_per_node 8 \
   --vllm.num_engines 8 \
   --vllm.gpu_memory_utilization 0.5 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   \
   --algo.advantage.estimator gae \
   --algo.kl.init_coef 0.01 \
   --rollout.batch_size 1024 \
   --rollout.micro_batch_size 16 \
   --train.batch_size 128 \
   --train.micro_batch_size 8 \
   \
   --ds.zero_stage 3 \
   --ds.packing_samples \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --critic.adam.lr 9e-6 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
