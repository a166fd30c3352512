#!/usr/bin/env bash
# REINFORCE++-baseline with a multi-turn agent, sampling while training, on 8 GPUs: 4 train, 4 sample.
# Flags given to this script come last and win, for example: bash examples/scripts/train_reinforce_baseline_ray_agent_async.sh --train.seed 1
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

MODEL=${MODEL:-Qwen/Qwen3-4B-Thinking-2507}
AGENT=${AGENT:-examples/python/agent_func.py}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/Qwen3-4B-agent}

exec python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --train.agent_func_path "$AGENT" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 32768 \
   --rollout.max_new_tokens 8192 \
   \
   --train.async_enable \
   --train.async_queue_size 1 \
   --train.partial_rollout_enable \
   --train.colocate_actor_ref \
   --actor.num_gpus_per_node 4 \
   --ref.num_gpus_per_node 4 \
   --vllm.num_engines 4 \
   --vllm.gpu_memory_utilization 0.9 \
   --vllm.enable_prefix_caching \
   \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.kl.init_coef 1e-5 \
   --algo.advantage.is_correction_enable \
   --algo.advantage.is_correction_type icepop \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 \
   --rollout.vllm_generate_batch_size 256 \
   --train.batch_size 1024 \
   --algo.dynamic_filtering_enable \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 32768 \
   --ds.ring_attn_size 2 \
   --ds.ring_attn_head_stride 2 \
   \
   --ds.zero_stage 3 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
