#!/usr/bin/env bash
# PPO with a critic and a reward model in the cluster; all models and the engines share 8 GPUs.
# Flags given to this script come last and win, for example: bash examples/scripts/train_ppo_ray_hybrid_engine.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
PROMPTS=${PROMPTS:-OpenRLHF/prompt-collection-v0.1}
OUTPUT=${OUTPUT:-./exp/llama3-8b-ppo}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --reward.model_name_or_path "$REWARD_MODEL" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key context_messages \
   --data.apply_chat_template \
   --data.max_len 2048 \
   --rollout.max_new_tokens 1024 \
   \
   --train.colocate_all \
   --actor.num_gpus_per_node 8 \
   --critic.num_gpus_per_node 8 \
   --ref.num_gpus_per_node 8 \
   --reward.num_gpus_per_node 8 \
   --vllm.num_engines 4 \
   --vllm.tensor_parallel_size 2 \
   --vllm.gpu_memory_utilization 0.5 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   \
   --algo.advantage.estimator gae \
   --algo.kl.init_coef 0.01 \
   --algo.kl.estimator k1 \
   --reward.normalize_enable \
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
