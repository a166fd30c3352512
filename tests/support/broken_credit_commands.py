"""The lines of `broken_rl_commands` about estimators, what turns are credited with, and which prompts are drawn."""

from __future__ import annotations

AGENT = "--train.agent_func_path a.py --reward.remote_url None"
RLOO = "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --rollout.batch_size 32"

CREDIT_CASES = [
    # B012
    ("--algo.advantage.estimator rloo", "rollout.n_samples_per_prompt", "compares the samples", RLOO),
    ("--algo.advantage.estimator group_norm", "algo.advantage.estimator", "compares", RLOO),
    ("--algo.advantage.estimator reinforce_baseline", "algo.advantage.estimator", "compares", RLOO),
    ("--algo.advantage.estimator dr_grpo", "algo.advantage.estimator", "compares the samples", RLOO),
    (f"{RLOO} --critic.model_name_or_path C", "critic.model_name_or_path", "only the estimator gae", RLOO),
    (f"{RLOO} --critic.freezing_steps 3", "critic.freezing_steps", "has a critic", "--critic.freezing_steps 3"),
    (f"{RLOO} --critic.save_value_network", "critic.save_value_network", "", "--critic.save_value_network"),
    (f"{RLOO} --algo.advantage.gamma 0.9", "algo.advantage.gamma", "gae and reinforce", "--algo.advantage.gamma 0.9"),
    (
        "--algo.dynamic_filtering_enable",
        "rollout.n_samples_per_prompt",
        "the mean score over a prompt's samples",
        f"--algo.dynamic_filtering_enable {RLOO}",
    ),
    (
        "--algo.dynamic_filtering_range 1 0",
        "algo.dynamic_filtering_range",
        "smaller",
        "--algo.dynamic_filtering_range 0 1",
    ),
    ("--algo.dynamic_filtering_range 1 1", "algo.dynamic_filtering_range", "", "--algo.dynamic_filtering_range 1 2"),
    (
        "--algo.turn_rewards to_go",
        "train.agent_func_path",
        "only agents have turns",
        f"--algo.turn_rewards to_go {AGENT}",
    ),
    (
        f"--algo.turn_rewards each {AGENT}",
        "algo.advantage.estimator",
        "the same as to_go",
        f"--algo.turn_rewards each {AGENT} {RLOO}",
    ),
    (
        f"--algo.turn_rewards to_go {AGENT} --algo.advantage.estimator on_policy_distill --algo.kl.init_coef 0"
        " --ref.model_name_or_path T",
        "algo.turn_rewards",
        "the teacher's",
        f"--algo.turn_rewards to_go {AGENT}",
    ),
    (
        f"--algo.turn_gamma 0.9 {RLOO}",
        "algo.turn_rewards",
        "turns are discounted where",
        f"--algo.turn_gamma 0.9 --algo.turn_rewards to_go {AGENT} {RLOO}",
    ),
    (
        f"--algo.turn_gamma 0.9 --algo.turn_rewards to_go {AGENT}",
        "algo.advantage.estimator",
        "turns are discounted where",
        f"--algo.turn_rewards to_go {AGENT}",
    ),
    (
        "--data.curriculum_uniform 0.2",
        "data.curriculum",
        "once per episode each",
        "--data.curriculum window --data.curriculum_uniform 0.2",
    ),
    (
        "--data.curriculum prioritised --data.curriculum_window 0 0.5",
        "data.curriculum_window",
        "bounds the estimates of a window",
        "--data.curriculum window --data.curriculum_window 0 0.5",
    ),
    ("--data.curriculum window --data.curriculum_window 0.5 0.5", "data.curriculum_window", "smaller", ""),
    ("--data.curriculum window --data.curriculum_uniform 0", "data.curriculum_uniform", "more than 0", ""),
    (
        "--data.curriculum window --reward.remote_url None --reward.model_name_or_path R",
        "data.curriculum",
        "scores come from a reward function",
        "--reward.remote_url None --reward.model_name_or_path R",
    ),
    ("--algo.turn_gamma 1.5", "algo.turn_gamma", "at most 1", ""),
]
