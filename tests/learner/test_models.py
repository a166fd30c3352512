"""Scalar heads: which are taken, which are made, which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.export import export_hf
from openrlhf.learner.heads import ScalarHead
from openrlhf.learner.layers import recurrent_layers
from openrlhf.learner.models import check_attention, load_module, reward_statistics
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.packing import build_inputs, build_last_token_inputs
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch, save_tiny_model, tiny_config
from support.plain_backend import PlainEngine

CPU = torch.device("cpu")


def load(path: Path, role: Role, prefix: str = "score", optim: OptimConfig | None = None) -> LearnerModule:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", value_head_prefix=prefix)
    return load_module(LearnerSpec(role=role, model_path=str(path), ds=ds, optim=optim), CPU)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm: a language model. classifier: a sequence-classification model of transformers, with mean and std."""
    from transformers import AutoModelForSequenceClassification

    path = tmp_path_factory.mktemp("models")
    save_tiny_model(path / "lm")
    for arch in ("qwen3", "gpt2"):
        config = tiny_config(arch)
        config.num_labels, config.pad_token_id, config.mean, config.std = 1, 0, 0.25, 2.0
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path / f"classifier-{arch}")
    return path


def rewards(module: LearnerModule, *, packed: bool = False) -> torch.Tensor:
    with torch.no_grad():
        return module(build_last_token_inputs(make_batch(), packed=packed)).primary


def _classifier_scores(path: Path) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    batch = make_batch()
    with torch.no_grad():
        rows = [model(batch.tokens[r : r + 1, : int(batch.lengths[r])]).logits[0, 0] for r in range(batch.size)]
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
def test_rewards_equal_those_of_transformers(models: Path, arch: str, packed: bool) -> None:
    # B022, B120
    module = load(models / f"classifier-{arch}", Role.REWARD)
    want = _classifier_scores(models / f"classifier-{arch}")
    assert float((rewards(module, packed=packed) - want).abs().max()) < 1e-5
    assert reward_statistics(module) == (0.25, 2.0)


def test_reward_model_with_another_head_name_is_refused_naming_both(models: Path) -> None:
    # B120
    with pytest.raises(ValueError, match=r"no head 'value_head'; it has 'score'.*`ds\.value_head_prefix`"):
        load(models / "classifier-qwen3", Role.REWARD, "value_head")
    with pytest.raises(ValueError, match=r"no head 'value_head'; it has 'score'"):
        load(models / "classifier-qwen3", Role.CRITIC, "value_head", OptimConfig())


def test_reward_model_without_any_head_is_refused(models: Path) -> None:
    # B120
    with pytest.raises(ValueError, match="no scalar head at all"):
        load(models / "lm", Role.REWARD)


def test_critic_from_a_language_model_gets_a_new_head(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    # B120
    with caplog.at_level("INFO"):
        first, second = (load(models / "lm", Role.CRITIC, optim=OptimConfig()) for _ in range(2))
    assert "a new one is initialised" in caplog.text
    assert isinstance(first.head, ScalarHead)
    assert isinstance(second.head, ScalarHead)
    assert torch.equal(first.head.weight, second.head.weight)
    assert float(first.head.weight.detach().std()) == pytest.approx(1 / 65, rel=0.3)


def test_critic_from_a_reward_model_takes_its_head(models: Path) -> None:
    # B120
    module = load(models / "classifier-qwen3", Role.CRITIC, optim=OptimConfig())
    assert torch.equal(rewards(module), rewards(load(models / "classifier-qwen3", Role.REWARD)))


@pytest.mark.parametrize("packed", [False, True])
def test_values_do_not_depend_on_padding_or_neighbours(models: Path, packed: bool) -> None:
    # B022, B023: the value of the state before each trainable token, as of the sample alone
    module, batch = load(models / "lm", Role.CRITIC, optim=OptimConfig()), make_batch()
    inputs = build_inputs(batch, batch.action_mask, packed=packed)
    with torch.no_grad():
        together = inputs.scatter(module(inputs).primary, batch.tokens.shape)
        for row in range(batch.size):
            states = module.model(batch.tokens[row : row + 1, : int(batch.lengths[row])]).last_hidden_state[0]
            want = torch.zeros(batch.tokens.shape[1])
            want[1 : len(states)] = states[:-1] @ module.head.weight[0]  # pyright: ignore[reportIndexIssue, reportOperatorIssue, reportArgumentType]
            assert float((together[row] - want * batch.action_mask[row]).abs().max()) < 1e-5


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_exported_reward_model_gives_the_same_rewards(models: Path, tmp_path: Path, prefix: str) -> None:
    # B120: the head's name and the reward statistics are kept in the configuration; the stored name wins
    module = load(models / "lm", Role.CRITIC, prefix, OptimConfig())
    module.model.config.mean, module.model.config.std = 1.5, 0.5
    export_hf(PlainEngine(module), str(tmp_path / "rm"), None)
    again = load(tmp_path / "rm", Role.REWARD, "score")
    assert again.head_name == prefix
    assert torch.equal(rewards(again), rewards(module))
    assert reward_statistics(again) == (1.5, 0.5)
    if prefix == "score":
        assert float((_classifier_scores(tmp_path / "rm") - rewards(module)).abs().max()) < 1e-5


def test_head_with_several_labels_is_refused(models: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    config = tiny_config()
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="num_labels 1"):
        load(tmp_path / "three", Role.REWARD)


def test_missing_flash_attention_names_the_command() -> None:
    with pytest.raises(ValueError, match="pip install flash-attn"):
        check_attention("flash_attention_2")


def hybrid_config() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(num_hidden_layers=4, hidden_size=64)


def test_packing_is_refused_for_layers_with_a_state(tmp_path: Path) -> None:
    # B023
    hybrid_config().save_pretrained(tmp_path)
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", packing_samples=True)
    spec = LearnerSpec(role=Role.POLICY, model_path=str(tmp_path), ds=ds)
    with pytest.raises(ValueError, match=r"linear_attention layers.*leave `ds\.packing_samples` and `batch\.dynamic"):
        load_module(spec, CPU)


@pytest.mark.parametrize(
    ("config_class", "found"),
    [
        ("Qwen3NextConfig", ["linear_attention"]),
        ("Qwen3_5TextConfig", ["linear_attention"]),
        ("MambaConfig", ["linear_attention"]),
        ("FalconH1Config", ["hybrid"]),
        ("RecurrentGemmaConfig", ["recurrent"]),
        ("RwkvConfig", ["rwkv"]),
        ("Gemma3TextConfig", []),
        ("Qwen3Config", []),
        ("GPT2Config", []),
    ],
)
def test_layers_with_a_state(config_class: str, found: list[str]) -> None:
    import transformers

    assert recurrent_layers(getattr(transformers, config_class)()) == found
