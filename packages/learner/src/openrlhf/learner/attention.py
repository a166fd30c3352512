"""The seam to transformers' attention: a call of the model that comes with `attend` leaves all attention to it.

transformers hands unknown arguments of a model down to its attention function, also when a checkpointed layer runs
again, and looks that function up by name at every call. So the functions of its table are wrapped once, and calls
without `attend` go on as before. Models with an attention of their own never ask: who passes `attend` has to try out
whether it is heard.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class Attend(Protocol):
    """Attention of one layer. query [B, H, T, D], key and value [B, H_kv, T, D] -> [B, T, H, D].

    mask: what transformers made of the padding and the positions. scaling: of the scores; None: 1 / sqrt(D).
    options: whatever else the model's layer says (sliding_window, softcap, ...), which must not be ignored.
    """

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        scaling: float | None,
        **options: Any,
    ) -> Tensor: ...


class _Wrapped:
    """transformers' attention function, unless the call comes with `attend`."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        attend: Attend | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if attend is None:
            return self.plain(module, query, key, value, attention_mask, *args, **options)
        options.setdefault("scaling", None)
        return attend(module, query, key, value, attention_mask, **options), None


def open_seam(implementation: str) -> bool:
    """Wrap the function of this name; twice is harmless. False where transformers has none (eager)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if implementation not in ALL_ATTENTION_FUNCTIONS:
        return False
    plain = ALL_ATTENTION_FUNCTIONS[implementation]
    if not isinstance(plain, _Wrapped):
        AttentionInterface.register(implementation, _Wrapped(plain))
    return True
