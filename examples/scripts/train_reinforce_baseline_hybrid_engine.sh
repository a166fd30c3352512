#!/usr/bin/env bash
# REINFORCE++-baseline on math (RLVR), the default recipe: models and engines share 4 GPUs.
# Flags given to this script come last and win, for example: bash examples/scripts/train_reinforce_baseline_hybrid_engine.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-Qwen/Qwen3-4B-Thinking-2507}
REWARD=${REWARD:-examples/python/math_reward_func.py}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/Qwen3-4B-Thinking}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --reward.remote_url "$REWARD" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 74240 \
   --rollout.max_new_tokens 64000 \
   \
   --train.colocate_all \
   --actor.num_gpus_per_node 4 \
   --ref.num_gpus_per_node 4 \
   --vllm.num_engines 2 \
   --vllm.tensor_parallel_size 2 \
   --vllm.gpu_memory_utilization 0.7 \
   --vllm.enable_sleep \
   --vllm.enforce_eager \
   --ds.enable_sleep \
   \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.kl.init_coef 1e-5 \
   --actor.entropy_coef 0.0 \
   --algo.advantage.is_correction_enable \
   --algo.advantage.is_correction_type icepop \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 \
   --train.batch_size 1024 \
   --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0.0 1.0 \
   --train.dynamic_batch_enable \
   --ds.ring_attn_size 2 \
   --ds.ring_attn_head_stride 2 \
   \
   --ds.zero_stage 3 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
