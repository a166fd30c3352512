"""Losses and advantages by file: read, tried before anything starts, shipped to ranks, compared when a run goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.agents.files import CodeFileError
from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig, PolicyLossConfig
from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError
from openrlhf.launcher.plugins import Plugins, check_plugins, read_plugins, split_path
from openrlhf.launcher.ranks.batches import combine_sums
from openrlhf.launcher.ranks.roles import PolicyRank
from support.toy_ranks import references, sampled, toy_config, toy_rank
from support.trainer_fakes import fake_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
LOSS, ADVANTAGES = EXAMPLES / "policy_loss.py", EXAMPLES / "advantages.py"


def configuration(**flags: Any) -> TrainPPOConfig:
    return build(TrainPPOConfig(), {name.replace("__", "."): value for name, value in flags.items()})


def checked(**flags: Any) -> Plugins:
    config = configuration(**flags)
    plugins = read_plugins(config)
    check_plugins(config, plugins)
    return plugins


def updates(plugins: Plugins, loss: PolicyLossConfig, estimator: str = "reinforce", gamma: float = 1.0) -> Any:
    """Gradients and metrics of two epochs over two mini-batches, the second off policy, and the advantages."""
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator, gamma=gamma), kl=KLConfig(init_coef=0.0))
    rank = toy_rank(PolicyRank, torch.zeros(4, 4), toy_config(algo, loss, plugins=plugins), max_epochs=2)
    rows = [sampled([0, 1, 2, 3], logprob=-1.5), sampled([0, 3, 1]), sampled([0, 2, 2, 1]), sampled([0, 1])]
    batch = rank.prepare([references(rows[:2], (1.0, -0.5)), references(rows[2:], (0.25, 2.0))], scores={}, kl_coef=0.0)
    old, mask = batch.batch.old_logprobs, batch.batch.action_mask
    assert old is not None
    old += 0.9 * torch.sin(torch.arange(old.numel(), dtype=torch.float32)).view_as(old) * mask  # as after an update
    metrics = combine_sums([rank.update(batch, [0, 1], kl_coef=0.0)])
    found: Any = rank.learner
    return found.gradients, metrics, batch.batch.advantages


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_copy_of_ppo_gives_the_bits_of_ppo(mode: Any) -> None:
    loss = PolicyLossConfig(loss_agg_mode=mode)
    own = checked(actor__loss_path=str(LOSS), actor__loss_agg_mode=mode)
    (gradients, metrics, _), (ours, our_metrics, _) = updates(own, loss), updates(Plugins(), loss)
    assert len(gradients) == 2
    assert all(float(g.abs().max()) > 0 for g in gradients)
    assert all(torch.equal(g, o) for g, o in zip(gradients, ours, strict=True))
    assert {name: our_metrics[name] for name in metrics} == metrics
    assert metrics["train/ppo_clip_ratio"] > 0


def test_own_advantages_are_trained_on() -> None:
    own = checked(algo__advantage__path=str(ADVANTAGES))
    loss = PolicyLossConfig()
    *_, mine = updates(own, loss, "dr_grpo", gamma=0.5)
    *_, ours = updates(Plugins(), loss, "reinforce", gamma=0.5)
    *_, plain = updates(Plugins(), loss, "dr_grpo")
    assert mine[0, 1:4].tolist() == pytest.approx([0.25, 0.5, 1.0])
    assert plain[0, 1:4].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert ours.shape == mine.shape


def test_plain_paths_and_paths_with_a_name() -> None:
    assert split_path("a/b.py", "policy_loss") == ("a/b.py", "policy_loss")
    assert split_path("a/b.py:mine", "policy_loss") == ("a/b.py", "mine")
    assert split_path("C:/b.py", "policy_loss") == ("C:/b.py", "policy_loss")


GOOD = LOSS.read_text()
FILES = {
    "missing file": (None, r"--actor\.loss_path: file not found: "),
    "syntax": ("def policy_loss(:\n", r"--actor\.loss_path: syntax error in .*line 1"),
    "import": ("import no_such_module\n", r"cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    "missing function": (
        GOOD.replace("def policy_loss", "def my_loss"),
        r"has no function policy_loss; it has my_loss",
    ),
    "no function": ("policy_loss = 3\n", r"has no function policy_loss; it has none"),
    "mean": (GOOD.replace("total=total", "total=total / count"), r"policy_loss of .* the mean over the micro-batch"),
    "count": (
        GOOD.replace("count=count", "count=1.0"),
        r"the count 1 .*; --actor\.loss_agg_mode 'token-mean' counts by",
    ),
    "detached": (GOOD.replace("total=total", "total=total.detach()"), r"total without a gradient: it is detached"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    content, reason = FILES[name]
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CodeFileError, match=reason):
        checked(actor__loss_path=str(path))


def test_another_name_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD.replace("def policy_loss", "def my_loss"))
    plugins = checked(actor__loss_path=f"{tmp_path}/mine.py:my_loss")
    assert plugins.loss is not None
    assert plugins.loss.name == "my_loss"


def test_an_estimator_is_tried_too(tmp_path: Path) -> None:
    whitening = ADVANTAGES.read_text().replace("return returns, returns", "return returns / returns.std(), returns")
    (tmp_path / "mine.py").write_text(whitening)
    with pytest.raises(CodeFileError, match=r"--algo\.advantage\.path: compute_advantages of .* normalises inside the"):
        checked(algo__advantage__path=f"{tmp_path}/mine.py")


RUN = "--actor.model_name_or_path A --data.prompt_dataset d --vllm.num_engines 1 --reward.remote_url r.py"


def test_a_loss_by_name_and_one_by_file_exclude_each_other() -> None:
    flags = [*RUN.split(), "--actor.loss_path", "l.py", "--actor.policy_loss_type", "cispo"]
    with pytest.raises(UsageError, match=r"--actor\.loss_path l\.py and --actor\.policy_loss_type cispo: the file's"):
        prepare(TRAIN_PPO_RAY, flags, Machine(gpus=0))


def test_an_estimator_of_ones_own_may_discount() -> None:
    flags = [*RUN.split(), *["--algo.advantage.estimator", "dr_grpo", "--rollout.n_samples_per_prompt", "2"]]
    flags += ["--algo.advantage.gamma", "0.9"]
    with pytest.raises(UsageError, match="discount"):
        prepare(TRAIN_PPO_RAY, flags, Machine(gpus=0))
    config, _ = prepare(TRAIN_PPO_RAY, [*flags, "--algo.advantage.path", "a.py"], Machine(gpus=0))
    assert config.algo.advantage.gamma == 0.9


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [("a", "a", ""), ("a", "b", "was another file"), ("a", None, "was given"), (None, "b", "was not given")],
)
def test_a_run_that_goes_on_says_when_its_loss_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str | None, after: str | None, words: str
) -> None:
    flags = {"ckpt.path": str(tmp_path), "ckpt.save_steps": 1, "ckpt.best_metric_key": "none"}

    def trained(content: str | None, first: int = 1, **more: Any) -> None:
        run = fake_run(4, **flags, **more, sources={} if content is None else {"actor.loss_path": content})
        run.sink.first = first
        run.run()

    trained(before)
    saved = sorted(tmp_path.glob("global_step*/state/actor.loss_path.py"))
    assert [path.read_text() for path in saved] == [before] * len(saved)
    assert bool(saved) is (before is not None)
    with caplog.at_level(logging.WARNING):
        trained(after, 3, **{"ckpt.load_enable": True, "train.num_episodes": 2})
    said = [r.getMessage() for r in caplog.records if "loss_path" in r.getMessage()]
    assert [words in message for message in said] == ([True] if words else [])
