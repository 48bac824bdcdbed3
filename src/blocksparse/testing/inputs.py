"""Inputs, cases, budgets of errors, and the errors that checks of stages raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import a, hash_seed, multiple, shown, size
from blocksparse.order.content_orders import GlobalIndexMap
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.spec import AttentionSpec


def make_qkv(
    *,
    B: int = 1,
    Hq: int = 4,
    Hkv: int = 2,
    M: int | None = None,
    N: int = 200,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]`, `v` `[B, Hkv, N, Dv]` whose blocks differ in importance.

    Nearby tokens are similar, all queries attend strongly to the same few keys, and the first key is a sink, so
    that block scores differ as in a real model. Numbers are drawn in fp32 on the CPU and rounded once to `dtype`.
    `M` is `N` and `Dv` is `D` if None. The queries are the last `M` of `N` tokens. With more queries than keys,
    which is for calls that are not causal, the keys are the first `N` of `M`.

    Raises:
        TypeError, ValueError: a size is not a whole number, at least 1; `Hq` is not a multiple of `Hkv`; or
            `dtype` is not a floating-point dtype.
    """
    size.check(B=B, Hq=Hq, Hkv=Hkv, N=N, D=D)
    M, Dv = N if M is None else M, D if Dv is None else Dv
    size.check(M=M, Dv=Dv)
    hash_seed.check(seed=seed)
    a(torch.dtype).check(dtype=dtype)
    a(str, torch.device).check(device=device)
    multiple("Hq", Hq, "Hkv", Hkv)
    if not dtype.is_floating_point:
        raise ValueError(f"'dtype' must be a floating-point dtype: {dtype}")
    generator = torch.Generator("cpu").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    T = max(M, N)
    topic = randn(B, Hkv, (T + 39) // 40, D).repeat_interleave(40, dim=2)[:, :, :T]
    k = topic[:, :, :N] + 0.7 * randn(B, Hkv, N, D)
    shared = randn(B, Hkv, 1, D)
    k[:, :, torch.randint(N, (1 + N // 50,), generator=generator, device="cpu")] += shared
    k[:, :, :1] += 1.5 * shared
    q = (topic + 0.8 * shared).repeat_interleave(Hq // Hkv, dim=1) + 0.7 * randn(B, Hq, T, D)
    v = randn(B, Hkv, N, Dv)
    q = q[:, :, T - M :]
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, k, v


LENGTHS = ((1, 1), (40, 40), (129, 129), (200, 77), (200, 1))
"""The default cases `(N, M)`: N keys, and M queries at their end."""
SCALE = 0.25


@frozen
class Case:
    """One call that a stage is checked with."""

    N: int
    M: int
    causal: bool

    def spec(self, **more: Any) -> AttentionSpec:
        """The attention options of the call."""
        return AttentionSpec(scale=SCALE, causal=self.causal, **more)

    def inputs(
        self, *, D: int = 16, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`q` `[2, 4, M, D]`, `k` and `v` `[2, 2, N, D]`."""
        return make_qkv(B=2, Hq=4, Hkv=2, N=self.N, M=self.M, D=D, dtype=dtype, device=device, seed=self.N)


def cases(lengths: tuple[tuple[int, int], ...], causal: bool | None) -> list[Case]:
    """A case for every length: causal, not causal, or one of each if `causal` is None."""
    return [Case(N, M, c) for N, M in lengths for c in ((True, False) if causal is None else (causal,))]


def orders(q: Tensor, k: Tensor, needed: tuple[type | UnionType, ...], *, causal: bool) -> list[Permutation]:
    """The permutations of a check: identity, shuffled tokens and, if `needed` allows, a map per query group."""
    given: list[Permutation] = [GlobalPermutation(), shuffled(q, k)]
    if causal and all(issubclass(Permutation, need) for need in needed):
        given.append(GlobalIndexMap(64)(q, k, AttentionSpec(scale=SCALE)))
    return given


def shuffled(q: Tensor, k: Tensor) -> GlobalPermutation:
    """The queries of each head and the keys of each KV head in a random order."""
    (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
    draw = uniform(0)
    keys, queries = (draw(shape).argsort(-1).int() for shape in ((B, Hkv, 1, N), (B, Hq, M)))
    return GlobalPermutation(keys.to(k.device), queries.to(q.device))


def uniform(seed: int) -> Callable[[Sequence[int]], Tensor]:
    """A function that draws fp32 numbers in [0, 1) on the CPU, whatever the default device and dtype are."""
    draw = torch.Generator("cpu").manual_seed(seed)
    return lambda shape: torch.rand(tuple(shape), generator=draw, dtype=torch.float32, device="cpu")


def require(holds: bool | Tensor, sentence: str) -> None:
    """Raise an `AssertionError` that says `sentence` unless it holds."""
    if not bool(holds):
        raise AssertionError(sentence)


@contextmanager
def about(stage: object, case: object) -> Iterator[None]:
    """Put the stage and the case behind the message of an error that a check, the library or torch raises."""
    try:
        yield
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as found:
        raise AssertionError(f"{found} ({stage!r} with {_short(case)})") from found


def _short(case: object) -> str:
    """A case as text, with orders of tokens by their type alone."""
    if isinstance(case, tuple):
        return ", ".join(map(_short, case))
    if isinstance(case, Permutation):
        in_place = case.k_index is None and case.q_index is None
        return "tokens in place" if in_place else f"tokens moved by a {type(case).__name__}"
    return case if isinstance(case, str) else repr(case)


@contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Require that nothing is written into these tensors."""
    before = {name: x.clone() for name, x in tensors.items()}
    yield
    for name, x in tensors.items():
        same = torch.equal(x.nan_to_num(nan=0.5), before[name].nan_to_num(nan=0.5))
        require(same, f"it wrote into '{name}', which belongs to the caller")


def assert_within_budget(got: Tensor, want: Tensor, yardstick: Tensor, *, least: float = 0.0) -> None:
    """Require that `got` errs at most twice as much as `yardstick`, plus one rounding of the largest value.

    Args:
        got: the result to test, in its own precision.
        want: the true result in float64. From the same low-precision inputs.
        yardstick: the result of plain torch in the precision of `got`.
        least: an error that plain torch may have on other rows. For rows too few to tell.

    Raises:
        AssertionError: the error is over the budget, or `got` and `want` are not finite in the same places, or
            their shapes differ.
        TypeError, ValueError: one is not a floating-point tensor, or `yardstick` has another shape than `got`.
    """
    for name, x in {"got": got, "want": want, "yardstick": yardstick}.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"'{name}' must be a floating-point tensor: {shown(x)}")
    if yardstick.shape != got.shape:
        raise ValueError(
            f"'yardstick' must have the shape of 'got' {list(got.shape)}: {list(yardstick.shape)}. "
            "Compute both of one call."
        )
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} against {tuple(want.shape)}")
    finite = want.isfinite()
    if not bool((got.isfinite() == finite).all()):
        raise AssertionError(
            "finite and non-finite values are not where they should be. Look for NaN and overflow."
        )
    error, plain = (
        float((x.double() - want)[finite].abs().max()) if bool(finite.any()) else 0.0 for x in (got, yardstick)
    )
    largest = float(want[finite].abs().max()) if bool(finite.any()) else 0.0
    budget = 2 * max(plain, least) + torch.finfo(got.dtype).eps * largest
    if not error <= budget:
        raise AssertionError(f"error {error:.3e} is over the budget {budget:.3e} (plain torch errs {plain:.3e})")


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention over `pairs` `[B, Hq, M, N]` bool, in plain torch and the precision of the inputs.

    Args:
        softcap: a logit `x` becomes `softcap * tanh(x / softcap)`.
        sinks: `[Hq]`, one more logit for each head, without a value.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return _weights(q, k, pairs, scale, softcap, sinks) @ v


def error_of_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> float:
    """Error that one rounding of each logit makes of softmax attention, in fp32, or float64 for float64 inputs.

    A logit is a sum of D products, and every order of that sum has another error `e_ij`: about one rounding of
    `a_ij = scale sum_d |q_id k_jd|`. To first order it moves output `i` by `sum_j w_ij e_ij (v_j - o_i)`, at most
    `eps / 2 * sqrt(sum_j w_ij a_ij^2) * sqrt(sum_j w_ij (v_j - o_i)^2)` (Cauchy-Schwarz). This is the largest such
    bound. The error that plain torch has on a few rows is a matter of chance, and may be far below.

    Args: as those of `masked_attention`.
    """
    eps = torch.finfo(torch.promote_types(v.dtype, torch.float32)).eps
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = _weights(q, k, pairs, scale, softcap, sinks)
    sizes = q.abs() @ k.abs().transpose(-1, -2) * abs(scale)
    spread = (weights @ v.square() - (weights @ v).square()).clamp_min(0.0).sqrt()
    return float(eps / 2 * ((weights * sizes.square()).sum(-1, keepdim=True).sqrt() * spread).max())


def _weights(
    q: Tensor, k: Tensor, pairs: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    logits = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~pairs, float("-inf"))
    if sinks is not None:
        sink = sinks.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    return logits.softmax(-1).nan_to_num(0.0)
