"""Log-probs and entropies, from logits and from hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.core import logprobs
from openrlhf.core.logprobs import entropy_from_logits, logprobs_from_logits, token_logprobs
from openrlhf.core.masks import at_least_fp32
from support.core_helpers import INF, NAN, check, gradient

F64 = torch.float64


def plain_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """By torch's own log_softmax, in one piece."""
    wide = logits if logits.dtype == F64 else logits.float()
    return (wide / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def plain_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    logp = ((logits if logits.dtype == F64 else logits.float()) / temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def head(n: int = 7, h: int = 5, v: int = 11, dtype: torch.dtype = F64, seed: int = 0) -> tuple[Tensor, ...]:
    """hidden, weight, bias (all requiring grad) and targets."""
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g, dtype=F64).to(dtype).requires_grad_() for shape in ((n, h), (v, h), (v,))]
    return (*made, torch.randint(0, v, (n,), generator=g))


def test_b026_temperature_divides_the_logits() -> None:
    logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    assert float(logprobs_from_logits(logits, target, 0.5)) == pytest.approx(-0.0181499, abs=1e-6)
    assert float(logprobs_from_logits(logits, target, 1.0)) == pytest.approx(-0.1269280, abs=1e-6)
    chunked, _ = token_logprobs(torch.eye(1), logits.t(), target, 0.5)
    assert float(chunked) == pytest.approx(-0.0181499, abs=1e-6)
    p = 1 / (1 + math.exp(-4))
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert float(entropy_from_logits(logits, 0.5)) == pytest.approx(expected, abs=1e-6)


def chunked_entropy(logits: Tensor) -> Tensor:
    """The same logits, as a bias over a zero projection."""
    if logits.dtype == torch.float16:
        logits = logits.float()
    h, w = torch.zeros(1, 2, dtype=logits.dtype), torch.zeros(logits.shape[1], 2, dtype=logits.dtype)
    entropy = token_logprobs(h, w, torch.tensor([0]), bias=logits[0], with_entropy=True, chunk_vocab=2)[1]
    assert entropy is not None
    return entropy


# B020: tokens of probability zero.
@pytest.mark.parametrize("function", [entropy_from_logits, chunked_entropy])
@pytest.mark.parametrize(
    ("logits", "dtype", "expected"),
    [
        ([0, 0, -INF], torch.float32, math.log(2)),
        ([-INF, -INF, 0, 0], torch.float32, math.log(2)),
        ([0, -INF], torch.float32, 0.0),
        ([65504, -65504], torch.float16, 0.0),
        ([0, 0, 0, 0], torch.bfloat16, math.log(4)),
        ([3e38, -3e38, 0], torch.float32, 0.0),
    ],
)
def test_entropy_with_zero_probabilities(
    logits: list[float], dtype: torch.dtype, expected: float, function: Callable[[Tensor], Tensor]
) -> None:
    z = torch.tensor([logits], dtype=dtype, requires_grad=True)
    entropy = function(z)
    assert float(entropy.detach()) == pytest.approx(expected, abs=1e-6)
    check(gradient(entropy.sum(), z), torch.zeros(z.shape), 1e-6)


def test_target_of_probability_zero_has_a_finite_gradient() -> None:
    z = torch.tensor([0.0, -INF, 0.0], requires_grad=True)
    h, w = torch.zeros(1, 2), torch.zeros(3, 2)
    logp, _ = token_logprobs(h, w, torch.tensor([1]), bias=z, chunk_vocab=2)
    assert float(logp.detach()) == -INF
    check(gradient(logp.sum(), z), [-0.5, 1, -0.5])


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("tile", [(3, 4), (1, 1), (100, 100), (7, 11), (None, None)])
def test_equals_the_plain_way(
    with_entropy: bool, temperature: float, use_bias: bool, tile: tuple[int | None, int | None]
) -> None:
    hidden, weight, bias, targets = head()
    given_bias = bias if use_bias else None
    leaves = [hidden, weight, bias] if use_bias else [hidden, weight]
    logp, entropy = token_logprobs(hidden, weight, targets, temperature, given_bias, with_entropy, *tile)
    logits = torch.nn.functional.linear(hidden, weight, given_bias)
    plain, plain_h = plain_logprobs(logits, targets, temperature), plain_entropy(logits, temperature)
    check(logp, plain, 1e-12)
    up = torch.randn(2, 7, dtype=F64, generator=torch.Generator().manual_seed(1))
    total, plain_total = (logp * up[0]).sum(), (plain * up[0]).sum()
    if with_entropy:
        assert entropy is not None
        check(entropy, plain_h, 1e-12)
        total, plain_total = total + (entropy * up[1]).sum(), plain_total + (plain_h * up[1]).sum()
    else:
        assert entropy is None
    grads, expected = torch.autograd.grad(total, leaves), torch.autograd.grad(plain_total, leaves)
    for mine, theirs in zip(grads, expected, strict=True):
        check(mine, theirs, 1e-12)


def test_few_logits_are_computed_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same as recomputed ones, and of a second backward pass as well."""
    computed: list[slice] = []
    logits_of = logprobs._Head.logits

    def counted(self: logprobs._Head, hidden: Tensor, rows: slice, columns: slice) -> Tensor:
        computed.append(columns)
        return logits_of(self, hidden, rows, columns)

    monkeypatch.setattr(logprobs._Head, "logits", counted)

    def gradients() -> tuple[list[Tensor], list[Tensor], int]:
        computed.clear()
        hidden, weight, bias, targets = head(dtype=torch.float32)
        logp, entropy = token_logprobs(hidden, weight, targets, 0.7, bias, True, 3, 4)
        assert entropy is not None
        total = (logp * 1.5 + entropy).sum()
        once = torch.autograd.grad(total, [hidden, weight, bias], retain_graph=True)
        count = len(computed)
        return list(once), list(torch.autograd.grad(total, [hidden, weight, bias])), count

    saved, again, count = gradients()
    assert count == 9  # three slices of tokens, three of the vocabulary
    monkeypatch.setattr(logprobs, "_CPU_SAVED", 3 * 4 * 4)  # one tile
    partly, _, count = gradients()
    assert count == 9 + 8
    monkeypatch.setattr(logprobs, "_CPU_SAVED", 0)
    recomputed, _, count = gradients()
    assert count == 9 + 9
    for results in zip(saved, again, partly, recomputed, strict=True):
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "none"])
def test_gradient_goes_only_where_it_is_wanted(wanted: str) -> None:
    hidden, weight, bias, targets = head()
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    logp, entropy = token_logprobs(hidden, weight, targets, 0.7, bias, True, 3, 4)
    assert entropy is not None
    assert logp.requires_grad == entropy.requires_grad == (wanted != "none")
    if wanted == "none":
        return
    plain = torch.nn.functional.linear(hidden, weight, bias)
    expected = gradient((plain_logprobs(plain, targets, 0.7) + plain_entropy(plain, 0.7)).sum(), leaves[wanted])
    (logp + entropy).sum().backward()
    for name, leaf in leaves.items():
        if name == wanted:
            assert leaf.grad is not None
            check(leaf.grad, expected, 1e-12)
        else:
            assert leaf.grad is None


def test_weight_tied_to_the_embedding() -> None:
    table = torch.randn(11, 5, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids, targets = torch.tensor([1, 3, 3, 10]), torch.tensor([3, 3, 10, 0])
    chunked = gradient(token_logprobs(table[ids].tanh(), table, targets, chunk_tokens=3, chunk_vocab=4)[0].sum(), table)
    plain = gradient(plain_logprobs(table[ids].tanh() @ table.t(), targets).sum(), table)
    check(chunked, plain, 1e-12)


def test_half_precision_keeps_softmax_in_float32() -> None:
    hidden, weight, bias, targets = head(n=50, h=16, v=300, dtype=torch.bfloat16)
    logp, entropy = token_logprobs(
        hidden, weight, targets, bias=bias, with_entropy=True, chunk_tokens=16, chunk_vocab=64
    )
    logits = torch.nn.functional.linear(hidden, weight, bias)
    assert entropy is not None
    assert logp.dtype == entropy.dtype == torch.float32
    check(logp, plain_logprobs(logits, targets), 1e-5)
    check(entropy, plain_entropy(logits), 1e-5)
    grads = torch.autograd.grad(logp.sum(), (hidden, weight, bias))
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    exact = torch.autograd.grad(token_logprobs(wide[0], wide[1], targets, bias=wide[2])[0].sum(), wide)
    for mine, theirs in zip(grads, exact, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (7,), (0, 7), (700, 9), (2, 5000)])
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_given_logits_equal_the_plain_way(shape: tuple[int, ...], dtype: torch.dtype, tol: float) -> None:
    """Also where rows and columns need several tiles; the gradient has the dtype of the logits."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=g, dtype=F64) * 3).to(dtype).requires_grad_()
    targets = torch.randint(0, shape[-1], shape[:-1], generator=g)
    for mine, plain in (
        (logprobs_from_logits(logits, targets, 0.7), plain_logprobs(logits, targets, 0.7)),
        (entropy_from_logits(logits, 0.7), plain_entropy(logits, 0.7)),
    ):
        assert mine.dtype == (F64 if dtype == F64 else torch.float32)
        check(mine, plain, 1e-12 if dtype == F64 else 1e-5)
        up = torch.randn(mine.shape, generator=g, dtype=mine.dtype)
        ours = gradient((mine * up).sum(), logits)
        assert ours.dtype == dtype
        check(ours, gradient((plain * up).sum(), logits), tol)


def test_given_logits_are_never_widened_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    widen = at_least_fp32

    def record(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return widen(x)

    monkeypatch.setattr(logprobs, "at_least_fp32", record)
    logits = torch.zeros(1500, 9000, dtype=torch.bfloat16, requires_grad=True)
    total = logprobs_from_logits(logits, torch.zeros(1500, dtype=torch.long)).sum() + entropy_from_logits(logits).sum()
    gradient(total, logits)
    assert max(sizes) == 512 * 4096


def test_no_tokens() -> None:
    hidden, weight, bias, targets = head(n=0)
    logp, entropy = token_logprobs(hidden, weight, targets, bias=bias, with_entropy=True)
    assert entropy is not None
    assert logp.shape == entropy.shape == (0,)
    for grad in torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight, bias)):
        assert (grad == 0).all()


def test_nan_is_not_hidden() -> None:
    hidden, weight, _, targets = head(n=3)
    with torch.no_grad():
        hidden[1] = NAN
    logp, _ = token_logprobs(hidden, weight, targets)
    assert logp.isnan().tolist() == [False, True, False]


def test_float32_probabilities_sum_to_one_over_a_large_vocabulary() -> None:
    hidden, weight, _, _ = head(n=1, h=8, v=5_000, dtype=torch.float32)
    logp, _ = token_logprobs(hidden.expand(5_000, 8).detach(), weight.detach(), torch.arange(5_000), chunk_tokens=1024)
    assert float(logp.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"`temperature` must be > 0 to score tokens, got 0\.0"),
        ({"chunk_tokens": 0}, "chunk_tokens and chunk_vocab must be > 0"),
        ({"chunk_vocab": -1}, "chunk_tokens and chunk_vocab must be > 0"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets \[N\]"),
        ({"hidden": torch.zeros(7, 4, dtype=F64)}, r"hidden \[N, H\]"),
        ({"bias": torch.zeros(4, dtype=F64)}, r"bias \[V\]"),
        ({"hidden": torch.zeros(7, 5)}, "one dtype"),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    hidden, weight, bias, targets = head()
    arguments: dict[str, object] = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, **change}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**arguments)  # pyright: ignore[reportArgumentType]


def test_errors_of_the_plain_functions() -> None:
    with pytest.raises(ValueError, match="must agree"):
        logprobs_from_logits(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"`temperature`"):
        entropy_from_logits(torch.zeros(2, 3), 0.0)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    v=st.integers(1, 9),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    scale=st.sampled_from([0.1, 1.0, 100.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_tile(n: int, v: int, tile: tuple[int, int], scale: float, seed: int) -> None:
    hidden, weight, bias, targets = head(n, 3, v, seed=seed)
    bias = bias * scale
    logp, entropy = token_logprobs(hidden, weight, targets, 1.0, bias, True, *tile)
    assert entropy is not None
    logits = torch.nn.functional.linear(hidden, weight, bias)
    check(logp, plain_logprobs(logits, targets), 1e-9 * scale + 1e-10)
    check(entropy, plain_entropy(logits), 1e-9 * scale + 1e-10)
    assert (logp <= 0).all()
    assert (entropy >= -1e-9).all()
    assert (entropy <= math.log(v) + 1e-9).all()
