"""Numbers that authors return, and what is estimated from them: floats, ints, booleans, numpy or tensors of any type,
without importing any of those libraries (they all have `.tolist()` or `.item()`)."""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any


def to_plain(value: Any) -> Any:
    """Tensors and arrays as (nested) lists or numbers; everything else unchanged."""
    for method in ("tolist", "item"):
        read = getattr(value, method, None)
        if callable(read):
            return read()
    return value


def to_float(value: Any, name: str) -> float:
    """One number out of a number, a 0-d or one-element tensor, or a list of one. Raises ValueError naming `name`."""
    plain = to_plain(value)
    while isinstance(plain, Sequence) and not isinstance(plain, (str, bytes)) and len(plain) == 1:
        plain = to_plain(plain[0])
    if isinstance(plain, (numbers.Real, decimal.Decimal)):
        try:
            return float(plain)
        except OverflowError:  # an int beyond the floats: not finite for whoever reads it
            exact: Any = plain
            return math.inf if exact > 0 else -math.inf
    raise ValueError(f"{name} must be one number (float, int, bool, 0-d tensor), got {value!r}")


def to_finite(value: Any, who: str, name: str) -> float:
    """As `to_float`, of the entry `name` in what `who`, such as "step()", returned. Raises ValueError."""
    number = to_float(value, f'{who} "{name}"')
    if not math.isfinite(number):
        raise ValueError(f'{who} returned a non-finite "{name}": {number!r}')
    return number


def turn_rewards(value: Any, count: int, who: str) -> list[float]:
    """`count` finite numbers, one per turn, out of "turn_rewards" in what `who` returned. Raises ValueError."""
    plain = to_plain(value)
    if isinstance(plain, list | tuple) and len(plain) != count:
        raise ValueError(f'{who} returned {len(plain)} "turn_rewards" for {count} turns: {plain!r}')
    found = to_floats(plain, count, f'{who} "turn_rewards"')
    if any(reward is None or not math.isfinite(reward) for reward in found):
        raise ValueError(f'{who} returned "turn_rewards" that are no finite numbers: {found!r}')
    return [float(reward or 0.0) for reward in found]


def whole_reward(reward: float | None, turns: Sequence[float], who: str) -> float:
    """The episode's reward where its turns have rewards of their own: their sum, which a given `reward` must be too.

    Raises ValueError for another one.
    """
    total = math.fsum(turns)
    if reward is not None and not math.isclose(reward, total, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(
            f"{who} returned the reward {reward!r} beside turn rewards that add up to {total!r}: what a turn earned is "
            "part of the reward, so leave the reward out, or give the rest of it to the turn that earned it"
        )
    return total if reward is None else reward


def to_floats(value: Any, count: int, name: str) -> list[float | None]:
    """`count` numbers out of a tensor [count] or [count, 1], an array, a list, or one number where count is 1.

    None stays None (no value for that sample). Raises ValueError that shows both counts.
    """
    plain = to_plain(value)
    if isinstance(plain, (numbers.Real, decimal.Decimal)):
        plain = [plain]
    if isinstance(plain, tuple):
        plain = list(plain)
    if not isinstance(plain, list):
        raise ValueError(f"{name} must be {count} numbers, one per sample, got {type(value).__name__}: {value!r}")
    if count == 1 and len(plain) == 1 and isinstance(plain[0], list):
        plain = plain[0]
    if len(plain) != count:
        raise ValueError(f"{name} must have one value per sample: got {len(plain)}, expected {count}")
    return [None if item is None else to_float(item, f"{name}[{i}]") for i, item in enumerate(plain)]


def finite_logs(logs: Any) -> dict[str, float]:
    """The entries of an author's metric dict that are finite numbers; text, None, lists and NaN are left out."""
    if logs is None:
        return {}
    if not isinstance(logs, Mapping):
        raise ValueError(f"extra_logs must be a dict of numbers, got {type(logs).__name__}: {logs!r}")
    kept: dict[str, float] = {}
    for key, value in logs.items():
        number = as_number(value)
        if number is not None:
            kept[str(key)] = number
    return kept


def as_number(value: Any) -> float | None:
    """The finite number in `value`, or None where there is none."""
    try:
        number = to_float(value, "value")
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def unbiased_pass_at_k(correct: int, total: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement from `total` is correct.

    1 - C(total - correct, k) / C(total, k) (Chen et al., 2021, "Evaluating Large Language Models Trained on Code").
    """
    if not 1 <= k <= total:
        raise ValueError(f"pass@k needs 1 <= k <= samples, got k={k!r} of {total!r}")
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)
