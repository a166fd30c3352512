#!/usr/bin/env bash
# DAPO: asymmetric clip, token-mean loss, dynamic sampling, soft length limit and no KL, on 8 GPUs.
# Flags given to this script come last and win, for example: bash examples/scripts/train_dapo_ray_hybrid_engine.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-Qwen/Qwen3-4B-Thinking-2507}
REWARD=${REWARD:-examples/python/math_reward_func.py}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/Qwen3-4B-dapo}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --reward.remote_url "$REWARD" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 22528 \
   --rollout.max_new_tokens 20480 \
   \
   --train.colocate_all \
   --actor.num_gpus_per_node 8 \
   --vllm.num_engines 4 \
   --vllm.tensor_parallel_size 2 \
   --vllm.gpu_memory_utilization 0.7 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   \
   --algo.advantage.estimator group_norm \
   --algo.kl.init_coef 0 \
   --actor.eps_clip_low_high 0.2 0.28 \
   --actor.loss_agg_mode token-mean \
   --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0.0 1.0 \
   --reward.overlong_buffer_len 4096 \
   --reward.overlong_penalty_factor 1.0 \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 16 \
   --train.batch_size 512 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 24576 \
   \
   --ds.zero_stage 3 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 1e-6 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
