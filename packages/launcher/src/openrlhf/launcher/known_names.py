"""What values are called elsewhere (papers, other libraries, earlier releases), and what they are called here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from openrlhf.core.tables import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss

DAPO = "--algo.dynamic_filtering_enable --actor.eps_clip_low_high 0.2 0.28 --algo.kl.init_coef 0"
NOT_BUILT = "is not built"


def _same(value: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"it is called {value!r} here")


def _aliases(table: Mapping[str, Estimator] | Mapping[str, PolicyLoss]) -> dict[str, str]:
    return {alias: text for name, row in table.items() for alias, text in _same(name, row.aliases).items()}


_DTYPES = {
    **_same("bf16", "bfloat16 bf"),
    **_same("fp16", "float16 half"),
    **_same("fp32", "float32 float full single"),
}
_SCHEDULES = {
    **_same("constant", "none fixed flat const"),
    **_same("constant_with_warmup", "warmup warmupconstant"),
    **_same("cosine_with_min_lr", "cosinemin cosineminlr cosinewithminlrrate"),
    **_same("cosine", "cos cosineannealing cosinewarmup cosineannealinglr"),
    **_same("warmup_stable_decay", "wsd trapezoidal"),
}
_OPTIMISERS = _same("adam", "adamw adamwtorch fusedadam cpuadam adamwtorchfused deepspeedcpuadam")
_NEAR = f"this baseline {NOT_BUILT}; 'rloo' and 'reinforce_baseline' are near"

KNOWN: Mapping[str, Mapping[str, str]] = {
    "algo.advantage.estimator": {
        **_aliases(ESTIMATORS),
        "rloo++": "RLOO is 'rloo' here, and REINFORCE++-baseline 'reinforce_baseline'",
        "dapo": f"DAPO is 'group_norm' with {DAPO}",
        "gspo": "GSPO is 'group_norm' with --actor.policy_loss_type gspo",
        "prorl": "ProRL trains with 'reinforce_baseline' and --reward.stop_properly_penalty_coef",
        "remax": _NEAR,
        "opo": _NEAR,
        "cispo": "CISPO is 'group_norm' with --actor.policy_loss_type cispo",
        "sapo": "SAPO is 'group_norm' with --actor.policy_loss_type sapo",
        "dpo": "preference training is another command: python3 -m openrlhf.cli.train_dpo",
    },
    "actor.policy_loss_type": {
        **_aliases(POLICY_LOSSES),
        "grpo": "GRPO's loss is 'ppo', with --algo.advantage.estimator group_norm",
        "drgrpo": "Dr. GRPO's loss is 'ppo', with --algo.advantage.estimator dr_grpo and "
        "--actor.loss_agg_mode seq-mean-token-sum-norm",
        "dapo": f"DAPO's loss is 'ppo', with --algo.advantage.estimator group_norm and {DAPO}",
    },
    "actor.loss_agg_mode": {
        **_same("token-mean", "token tokens dapo tokenlevel"),
        **_same("seq-mean-token-mean", "seq sequence seqmean sequencemean grpo gspo sample"),
        **_same("seq-mean-token-sum-norm", "drgrpo seqmeantokensum constant"),
    },
    "algo.kl.estimator": {
        **_same("k1", "kl naive log logratio"),
        **_same("k2", "mse square squared"),
        **_same("k3", "lowvarkl lowvar lowvariance grpo schulman nonnegative"),
        "abs": f"the absolute difference {NOT_BUILT}; 'k2' is near",
        "full": "the KL over the whole vocabulary is --algo.distill.divergence reverse; 'k3' is near",
    },
    "algo.advantage.is_correction_type": {
        **_same("tis", "token truncate truncated tokentis clip clamp"),
        **_same("icepop", "mask tokenmask mis tokenmis pop"),
        **_same("seq-mask-tis", "seqmis sequencemask seqmask geometric geomean georis sequence seq"),
    },
    "actor.optim": _OPTIMISERS,
    "critic.optim": _OPTIMISERS,
    "optim": _OPTIMISERS,
    "model.loss_type": {
        **_same("sigmoid", "bradleyterry bt logsigmoid pairwise pairwiseloss ranking"),
        **_same("logexp", "logexploss softplus"),
    },
    "ds.param_dtype": _DTYPES,
    "ds.grad_accum_dtype": _DTYPES,
    "vllm.dtype": {
        **_same("bfloat16", "bf16 bf"),
        **_same("float16", "fp16 half"),
        **_same("float32", "fp32 float full"),
    },
    "ds.attn_implementation": {
        **_same("flash_attention_2", "flash flashattention flashattn flashattention2 flashattn2 fa fa2"),
        **_same("flash_attention_3", "flashattention3 flashattn3 fa3"),
        **_same("sdpa", "torch pytorch native scaleddotproduct scaleddotproductattention math"),
        **_same("eager", "vanilla manual default"),
        **_same("flex_attention", "flex flexattn"),
    },
    "actor.lr_scheduler": _SCHEDULES,
    "critic.lr_scheduler": _SCHEDULES,
    "lr_scheduler": _SCHEDULES,
    "vllm.sync_backend": {
        **_same("ipc", "cudaipc cuda"),
        "ray": f"weights through Ray's object store {NOT_BUILT}; 'auto' chooses the engines' own transfer",
        **_same("gloo", "cpu tcp"),
    },
    "data.overlong_prompts": {
        **_same("truncate", "cut left trim lefttruncate"),
        **_same("drop", "filter skip remove discard"),
        **_same("error", "raise fail"),
    },
}
"""Flag -> name as people write it (small letters and digits, and `+`) -> what to write instead."""


def known_name(flag: str, value: str) -> str:
    """What `value` is called at this flag, as a clause; empty for a name that nobody knows."""
    return KNOWN.get(flag, {}).get(re.sub(r"[^a-z0-9+]", "", value.lower()), "")


def no_such(kind: str, flag: str, value: str) -> str:
    """`there is no such <kind>`, and what the value is called here where that is known."""
    known = known_name(flag, value)
    return f"there is no such {kind}" + (f"; {known}" if known else "")
