"""Rules of what goes in: models, data, rewards, evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.agents.context import room_for_prompt
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.data.chat import template_problem
from openrlhf.launcher.data.locate import mixing_probabilities, split_entries
from openrlhf.launcher.flags import values_of
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.algorithm import with_critic
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at

P = TrainPPOConfig
Found = Iterator[Violation]

REQUIRED = {
    "actor.model_name_or_path": "there is no model to train",
    "data.prompt_dataset": "there are no prompts",
    "vllm.num_engines": "RL training samples with at least one vLLM engine",
}
FOR_EVALUATION = {
    "actor.model_name_or_path": "there is no model to evaluate",
    "eval.dataset": "there is nothing to evaluate on",
    "vllm.num_engines": "an evaluation samples with at least one vLLM engine",
}


def required(c: P, m: Machine) -> Found:
    """Flags without which no run starts."""
    for name, problem in (REQUIRED if c.trains else FOR_EVALUATION).items():
        if value_at(c, name) is None:
            yield broken(c, name, problem, f"add --{name}")


def template(c: object, m: Machine) -> Found:
    """A prompt template takes the prompt, and is used."""
    text = value_at(c, "data.input_template")
    if text is None:
        return
    if text.strip() and (problem := template_problem(text)):
        yield broken(c, "data.input_template", problem, "put {} where the prompt goes, once")


def one_template(c: P, m: Machine) -> Found:
    """Two ways to render a prompt."""
    if c.data.input_template is not None and c.data.apply_chat_template:
        problem = "a prompt is rendered by one of them"
        yield broken(c, "data.input_template data.apply_chat_template", problem, "leave one of them out")


def room_for_prompts(c: P, m: Machine) -> Found:
    """A sample holds prompt and response (O02)."""
    answer = c.rollout.max_new_tokens or 1
    if room_for_prompt(c.data.max_len, answer) < 1:
        yield broken(
            c,
            "rollout.max_new_tokens data.max_len",
            "no room is left for the prompt",
            f"--data.max_len {answer + 1} or more (the longest prompt comes on top), or fewer new tokens",
        )


def probabilities(c: object, m: Machine) -> Found:
    """One mixing probability per dataset."""
    for data, probs in (("prompt_dataset", "prompt_probs"), ("dataset", "dataset_probs")):
        section = value_at(c, "data")
        if not getattr(section, probs, None) or not getattr(section, data):
            continue
        try:
            mixing_probabilities(getattr(section, probs), len(split_entries(getattr(section, data))))
        except ValueError as error:
            fix = "one probability per dataset, separated by commas, such as 0.3,0.7"
            yield broken(c, f"data.{data} data.{probs}", str(error), fix)


def entries(c: object, m: Machine) -> Found:
    """Lists of sources have no empty places."""
    values = values_of(c)
    for name in ("data.prompt_dataset", "data.dataset", "eval.dataset", "reward.remote_url"):
        text = (values.get(name) or "").strip()
        try:
            split_entries(text or "-")
        except ValueError:
            yield broken(c, name, "a place between the commas is empty", "one entry between every two commas")


def interval(c: object, name: str, otherwise: str) -> Found:
    """Every N steps, or -1."""
    value = value_at(c, name)
    if value != -1 and value < 1:
        yield broken(c, name, f"it must be at least 1, or -1 for {otherwise}", f"--{name} 100 or --{name} -1")


def intervals(c: P, m: Machine) -> Found:
    """Evaluation and checkpoints happen every N steps, or never."""
    yield from interval(c, "eval.steps", "never")
    yield from interval(c, "ckpt.save_steps", "never")


def evaluation(c: P, m: Machine) -> Found:
    """Evaluation needs data."""
    for name, asked in (("eval.steps", c.eval.steps > 0), ("eval.at_start", c.eval.at_start)):
        if asked and c.eval.dataset is None and c.trains:
            yield broken(c, f"{name} eval.dataset", "there is nothing to evaluate on", "add --eval.dataset")
    if c.ckpt.best_metric_key not in ("", "none") and (c.eval.dataset is None or c.eval.steps <= 0):
        problem = "the metric never appears without evaluation"
        yield broken(c, "ckpt.best_metric_key eval.dataset eval.steps", problem, "add --eval.dataset and --eval.steps")


def images(c: P, m: Machine) -> Found:
    """What training on images cannot do."""
    if c.data.max_images_per_prompt <= 0:
        return
    name = "data.max_images_per_prompt"
    if c.has_critic:
        fix = f"--algo.advantage.estimator with one of {', '.join(with_critic(False))}"
        yield broken(c, f"{name} algo.advantage.estimator", "the critic reads no images", fix)
    if c.ds.packing_samples:
        problem = "packed samples lose the places of their images"
        yield broken(c, f"{name} ds.packing_samples", problem, "leave --ds.packing_samples out")
    if c.reward.model_name_or_path is not None:
        fix = "leave it out and use --reward.remote_url or --train.agent_func_path"
        yield broken(c, f"{name} reward.model_name_or_path", "a reward model in the cluster reads no images", fix)
    if c.ds.use_liger_kernel:
        problem = "Liger's kernels know no images"
        yield broken(c, f"{name} ds.use_liger_kernel", problem, "leave --ds.use_liger_kernel out")


RULES: tuple[Rule, ...] = (
    required,
    template,
    one_template,
    room_for_prompts,
    probabilities,
    entries,
    intervals,
    evaluation,
    images,
)
