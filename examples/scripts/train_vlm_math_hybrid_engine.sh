#!/usr/bin/env bash
# A vision-language model on geometry problems, on 8 GPUs. No packing and no critic: neither knows images.
# Flags given to this script come last and win, for example: bash examples/scripts/train_vlm_math_hybrid_engine.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-Qwen/Qwen3.5-2B}
REWARD=${REWARD:-examples/python/math_reward_func.py}
# Written by: python3 examples/python/prepare_geometry3k.py hiyouga/geometry3k
PROMPTS=${PROMPTS:-data/geometry3k/train.jsonl}
OUTPUT=${OUTPUT:-./exp/Qwen3.5-2B-geometry}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --actor.freeze_visual_encoder \
   --reward.remote_url "$REWARD" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.label_key label \
   --data.image_key images \
   --data.max_images_per_prompt 1 \
   --data.apply_chat_template \
   --data.max_len 4096 \
   --rollout.max_new_tokens 2048 \
   \
   --train.colocate_all \
   --actor.num_gpus_per_node 8 \
   --ref.num_gpus_per_node 8 \
   --vllm.num_engines 8 \
   --vllm.gpu_memory_utilization 0.7 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --ds.attn_implementation eager \
   --ds.param_dtype bf16 \
   \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k3 \
   --algo.kl.init_coef 1e-3 \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 \
   --rollout.micro_batch_size 4 \
   --train.batch_size 1024 \
   --train.micro_batch_size 2 \
   \
   --ds.zero_stage 3 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 1e-6 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
