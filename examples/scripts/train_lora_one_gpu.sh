#!/usr/bin/env bash
# LoRA on 1 GPU of 80 GB: REINFORCE++-baseline on math (RLVR) with a model of 7 billion weights. For one of 24 GB add
#   --ds.load_in_4bit --vllm.gpu_memory_utilization 0.7
# Flags given to this script come last and win, for example: bash examples/scripts/train_lora_one_gpu.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
REWARD=${REWARD:-examples/python/math_reward_func.py}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/Qwen2.5-7B-lora}

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
   --ds.lora.rank 16 \
   --ds.lora.alpha 32 \
   --actor.adam.lr 1e-5 \
   \
   --train.colocate_all \
   --actor.num_gpus_per_node 1 \
   --vllm.num_engines 1 \
   --vllm.gpu_memory_utilization 0.6 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.kl.init_coef 1e-4 \
   --rollout.batch_size 64 \
   --rollout.n_samples_per_prompt 8 \
   --train.batch_size 512 \
   --train.dynamic_batch_enable \
   \
   --ds.zero_stage 2 \
   --actor.gradient_checkpointing_enable \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
