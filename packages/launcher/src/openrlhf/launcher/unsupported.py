"""Flags that nothing honours: refused with the reason when they differ from their default, never ignored."""

from __future__ import annotations

from openrlhf.launcher.commands import Command
from openrlhf.launcher.flags import values_of

RL = "train_ppo_ray"
SUPERVISED = ("train_sft", "train_rm", "train_dpo")
EVERY = (RL, *SUPERVISED, "serve_rm", "lora_combiner")

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "use_ms": (EVERY, "models and data come from local folders or the Hugging Face hub, not from ModelScope"),
    "data.disable_fast_tokenizer": (EVERY, "transformers 5 has one tokenizer for each model; leave the flag out"),
    "ds.ring_attn_size": (EVERY, "ring attention is not built; keep it at 1"),
    "ds.ring_attn_head_stride": (EVERY, "ring attention is not built; keep it at 1"),
    "vllm.sync_with_ray": ((RL,), "weights always travel by the engines' own transfer; leave the flag out"),
    "ds.lora.rank": ((RL,), "LoRA is not built for RL; keep it at 0"),
    "ds.lora.alpha": ((RL,), "LoRA is not built for RL"),
    "ds.lora.dropout": ((RL,), "LoRA is not built for RL"),
    "ds.lora.target_modules": ((RL,), "LoRA is not built for RL"),
    "ds.load_in_4bit": ((RL,), "4-bit weights cannot be trained here nor sent to the engines; leave the flag out"),
    "local_rank": ((RL,), "the trainer starts its own ranks; start it with python3 -m, not with deepspeed or torchrun"),
}


def unsupported(command: Command, asked: object, resolved: object) -> list[str]:
    """One message per flag that the user set (`asked`), that still stands (`resolved`) and that nothing honours."""
    defaults, values, final = values_of(command.defaults), values_of(asked), values_of(resolved)
    refused = []
    for path, (commands, reason) in REFUSED.items():
        flag = command.flags.get(path)
        if flag is None or command.name not in commands or defaults[path] in (values[path], final[path]):
            continue
        setting = flag.option if values[path] is True else f"{flag.option} {flag.show(values[path])}"
        refused.append(f"{setting} is not supported: {reason}")
    return refused
