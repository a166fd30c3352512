#!/usr/bin/env bash
# REINFORCE++-baseline on two nodes of a Slurm cluster with 8 GPUs each: sbatch examples/scripts/train_ppo_ray_slurm.sh
# Ray is started on every node of the allocation, the training runs on the first, and its exit status is the job's.
# Flags given to this script come last and win.
#SBATCH --job-name=openrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-4B-Thinking-2507}
REWARD=${REWARD:-examples/python/math_reward_func.py}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
OUTPUT=${OUTPUT:-./exp/Qwen3-4B-slurm}

exec openrlhf-launch slurm --in-allocation -- \
   --actor.model_name_or_path "$MODEL" \
   --reward.remote_url "$REWARD" \
   --data.prompt_dataset "$PROMPTS" \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 18432 \
   --rollout.max_new_tokens 16384 \
   \
   --train.colocate_all \
   --actor.num_nodes 2 \
   --actor.num_gpus_per_node 8 \
   --ref.num_nodes 2 \
   --ref.num_gpus_per_node 8 \
   --vllm.num_engines 8 \
   --vllm.tensor_parallel_size 2 \
   --vllm.gpu_memory_utilization 0.7 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.kl.init_coef 1e-5 \
   --rollout.batch_size 256 \
   --rollout.n_samples_per_prompt 8 \
   --train.batch_size 2048 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 20480 \
   \
   --ds.zero_stage 3 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --ckpt.save_steps 10 \
   --ckpt.load_enable \
   --ckpt.path "$OUTPUT/checkpoints" \
   --ckpt.output_dir "$OUTPUT" \
   "$@"
