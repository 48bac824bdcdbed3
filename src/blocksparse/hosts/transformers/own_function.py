"""The own function of an attention class, which transformers names "eager", and what it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ONLY_EAGER = ("softcap", "s_aux", "sinks")
BY_QUERY = ("position_bias", "s_aux", "sinks")  # `[B|1, Hq|1, M|1, N|1]`, if they have four dimensions
_OPTIONS = frozenset(ONLY_EAGER + BY_QUERY)
_READ = ("sliding_window", "output_attentions")  # what else attached attention reads
_TOKENS = 64  # on which a function is tried


def forwards_of(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """The forward of a class, and of its base classes as far as one calls the next."""
    for base in kind.__mro__:
        forward = inspect.unwrap(vars(base).get("forward", base))
        if isinstance(forward, FunctionType):
            yield forward
            if "super" not in forward.__code__.co_names:
                return


def eager_of(kind: type[nn.Module]) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The function that the forward of a class names for "eager": most models have one, and some have several."""
    for forward in forwards_of(kind):
        names = (name for name in forward.__code__.co_names if name.endswith("eager_attention_forward"))
        if own := next((forward.__globals__[name] for name in names if name in forward.__globals__), None):
            return own  # type: ignore[no-any-return]
    return None


def refused_of(kind: type[nn.Module], *, eager: bool) -> frozenset[str]:
    """The options that a class may leave out without a pipeline, or that a pipeline would: `eager` or by sdpa."""
    if (own := eager_of(kind)) is None:
        return frozenset()
    of_sdpa = inspect.signature(sdpa_attention_forward).parameters
    known = inspect.signature(own).parameters if eager else of_sdpa
    unread = frozenset(list(known)[5:]).difference(of_sdpa, _OPTIONS, _READ, ("kwargs",)) if eager else frozenset()
    return unread | _OPTIONS.difference(known, _passed(kind))


def is_attention(module: nn.Module) -> bool:
    """Whether the own function of a module gives attention and adds nothing to it, as a bias.

    A few tokens tell, whatever the function reads from its module. It is not tried where the class passes options.
    """
    own, some = eager_of(type(module)), next(module.parameters(), torch.empty(0))
    if own is None or some.is_meta or not _OPTIONS.isdisjoint(_passed(type(module))):
        return True
    # fp32 shows small biases too. A function that multiplies by weights needs their dtype.
    return any(_attends(own, module, some.device, dtype) for dtype in (torch.float32, some.dtype))


def _attends(own: Callable[..., Any], module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or dtype.itemsize == 1:  # of quantized weights
        return False
    groups, config = getattr(module, "num_key_value_groups", 1), getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None) or groups
    drawn, sizes = torch.Generator().manual_seed(0), (_TOKENS, getattr(module, "head_dim", None) or 16)
    q, k, v = (
        torch.randn(1, n, *sizes, generator=drawn, device="cpu").to(device, dtype)
        for n in (heads, heads // groups, heads // groups)
    )
    seen = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=device).tril()
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]
    with torch.no_grad():
        try:
            out = own(module, q, k, v, mask, scaling=0.3, dropout=0.0)[0].transpose(1, 2)
        except Exception:  # it needs what transformers' functions do not get
            return False
        plain = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    rounding = max(1e-4, 4 * torch.finfo(dtype).eps)
    return out.shape == plain.shape and torch.allclose(out.to(dtype), plain, atol=rounding)


def _passed(kind: type[nn.Module]) -> set[object]:
    """The constants in the methods of a class, among them the names of the options that it passes."""
    return {x for _, method in inspect.getmembers(kind, inspect.isfunction) for x in _constants(method)}


def _constants(code: Any) -> Iterator[object]:
    """Of a function or its code, and of functions inside."""
    code = getattr(inspect.unwrap(code), "__code__", code)
    for value in getattr(code, "co_consts", ()):
        yield from value if isinstance(value, tuple) else (value, *_constants(value))
