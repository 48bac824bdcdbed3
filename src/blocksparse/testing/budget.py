"""The error that a result may have, and dense attention over a set of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.check.validators import shown


def assert_within_budget(got: Tensor, want: Tensor, yardstick: Tensor) -> None:
    """Require that `got` errs at most twice as much as `yardstick`, plus one rounding of the largest value.

    Args:
        got: the result to test, in its own precision.
        want: the true result in float64, from the same low-precision inputs.
        yardstick: the result of plain torch in the precision of `got`.

    Raises:
        AssertionError: the error is over the budget, or `got` and `want` are not finite in the same places, or
            their shapes differ.
        TypeError, ValueError: one is not a floating-point tensor, or `yardstick` has another shape than `got`.
    """
    for name, x in {"got": got, "want": want, "yardstick": yardstick}.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"'{name}' must be a floating-point tensor: {shown(x)}")
    if yardstick.shape != got.shape:
        raise ValueError(f"'yardstick' must have the shape of 'got' {list(got.shape)}: {list(yardstick.shape)}")
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} against {tuple(want.shape)}")
    finite = want.isfinite()
    if not bool((got.isfinite() == finite).all()):
        raise AssertionError("finite and non-finite values are not where they should be")
    error, allowed = (
        float((x.double() - want)[finite].abs().max()) if bool(finite.any()) else 0.0 for x in (got, yardstick)
    )
    largest = float(want[finite].abs().max()) if bool(finite.any()) else 0.0
    budget = 2 * allowed + torch.finfo(got.dtype).eps * largest
    if not error <= budget:
        raise AssertionError(f"error {error:.3e} is over the budget {budget:.3e} (plain torch errs {allowed:.3e})")


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
    logits = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~pairs, float("-inf"))
    if sinks is not None:
        sink = sinks.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat((logits, sink), -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1).nan_to_num(0.0) @ v
