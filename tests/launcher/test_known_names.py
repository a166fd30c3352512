"""Names that people know from papers and other libraries lead to the value of today."""

from __future__ import annotations

import pytest

from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY
from openrlhf.launcher.flags import ChoiceError
from openrlhf.launcher.known_names import KNOWN, known_name
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError, parse

ESTIMATOR = "algo.advantage.estimator"
CASES = [
    (ESTIMATOR, "grpo", "'group_norm'"),
    (ESTIMATOR, "GRPO", "'group_norm'"),
    (ESTIMATOR, "ppo", "'gae'"),
    (ESTIMATOR, "reinforce++", "'reinforce'"),
    (ESTIMATOR, "REINFORCE++-baseline", "'reinforce_baseline'"),
    (ESTIMATOR, "reinforce_plus_plus_baseline", "'reinforce_baseline'"),
    (ESTIMATOR, "rloo++", "'rloo'"),
    (ESTIMATOR, "rloo++", "'reinforce_baseline'"),
    (ESTIMATOR, "dapo", "'group_norm' with --algo.dynamic_filtering_enable"),
    (ESTIMATOR, "drgrpo", "'dr_grpo'"),
    (ESTIMATOR, "dr-grpo", "'dr_grpo'"),
    (ESTIMATOR, "Dr.GRPO", "'dr_grpo'"),
    (ESTIMATOR, "gspo", "'group_norm' with --actor.policy_loss_type gspo"),
    (ESTIMATOR, "group_nrm", "did you mean 'group_norm'?"),
    (ESTIMATOR, "reinforce_baselin", "did you mean 'reinforce_baseline'?"),
    ("actor.policy_loss_type", "grpo", "'ppo', with --algo.advantage.estimator group_norm"),
    ("actor.loss_agg_mode", "token_mean", "did you mean 'token-mean'?"),
    ("algo.kl.estimator", "low_var_kl", "'k3'"),
    ("algo.kl.estimator", "mse", "'k2'"),
    ("algo.advantage.is_correction_type", "ice-pop", "did you mean 'icepop'?"),
    ("actor.optim", "adamw", "'adam'"),
    ("ds.param_dtype", "bfloat16", "'bf16'"),
    ("vllm.dtype", "bf16", "'bfloat16'"),
]


@pytest.mark.parametrize(("flag", "value", "words"), CASES, ids=lambda x: x)
def test_l02_a_known_name_leads_to_the_value(flag: str, value: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(TRAIN_PPO_RAY, [f"--{flag}", value])
    (problem,) = caught.value.problems
    assert f"got {value!r}" in problem
    assert words in problem


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("ds.attn_implementation", "flash_attn", "'flash_attention_2'"),
        ("ds.grad_accum_dtype", "float32", "'fp32'"),
        ("actor.lr_scheduler", "wsd", "'warmup_stable_decay'"),
    ],
)
def test_l02_also_where_a_rule_refuses_the_value(flag: str, value: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        prepare(TRAIN_PPO_RAY, [f"--{flag}", value], Machine(gpus=8))
    (problem,) = [p for p in caught.value.problems if p.startswith(f"--{flag} {value}")]
    assert f"it is called {words} here" in problem


def test_l02_in_a_configuration_file(tmp_path) -> None:
    (tmp_path / "run.toml").write_text('[algo.advantage]\nestimator = "grpo"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="it is called 'group_norm' here"):
        parse(TRAIN_PPO_RAY, ["--config", str(tmp_path / "run.toml")])


@pytest.mark.parametrize("path", KNOWN)
def test_l02_what_is_suggested_exists(path: str) -> None:
    flags = [command.flags[path] for command in COMMANDS.values() if path in command.flags]
    assert flags, path
    for name, answer in KNOWN[path].items():
        assert known_name(path, name) == answer
        if answer.startswith("it is called '") and flags[0].shape.choices:
            value = answer.split("'")[1]
            assert value in flags[0].shape.choices
            if name not in flags[0].shape.choices:
                with pytest.raises(ChoiceError):
                    flags[0].shape.parse([name])
        for flag in [word for word in answer.split() if word.startswith("--")]:
            assert flag.removeprefix("--") in TRAIN_PPO_RAY.flags
