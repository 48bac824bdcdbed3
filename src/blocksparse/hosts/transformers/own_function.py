"""The own function of an attention class, which transformers names "eager", and what it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blocksparse.execute.dense_attention import dense_attention
from blocksparse.spec import AttentionSpec

ASKS = "ALL_ATTENTION_FUNCTIONS"  # the name by which a forward asks transformers for its function
SINKS = ("s_aux", "sinks")  # the names that models have for attention sinks
ONLY_EAGER = ("softcap", *SINKS)
BY_QUERY = ("position_bias", *SINKS)  # `[B|1, Hq|1, M|1, N|1]`, if they have four dimensions
_OPTIONS = frozenset(ONLY_EAGER + BY_QUERY)
_READ = ("sliding_window", "output_attentions")  # what else attached attention reads
_TOKENS, _SCALE, _SOFTCAP = 64, 0.3, 1.0  # on which a function is tried


def forwards_of(of: type[nn.Module] | nn.Module) -> Iterator[FunctionType]:
    """The forward of a class, or one put into a module, and of its base classes as far as one calls the next."""
    kind, put_in = (of, None) if isinstance(of, type) else (type(of), vars(of).get("forward"))
    for found in (put_in, *(vars(base).get("forward") for base in kind.__mro__)):
        forward = inspect.unwrap(found) if callable(found) else found
        forward = getattr(forward, "__func__", forward)
        # One that is put in and does not ask is around the forward of the class, as to time it.
        if isinstance(forward, FunctionType) and (found is not put_in or ASKS in forward.__code__.co_names):
            yield forward
            if "super" not in forward.__code__.co_names:
                return


def eager_of(of: type[nn.Module] | nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The function that a forward names for "eager": most models have one, and some have several."""
    for forward in forwards_of(of):
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

    A few tokens tell, whatever the function reads from its module. A function under another name is not found.
    """
    own, some = eager_of(module), next(module.parameters(), torch.empty(0))
    if own is None or some.is_meta or "position_bias" in _passed(type(module)):
        return own is not None
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
    # Some read the sinks of their module, and others those that they are given.
    sinks = next((x for name in SINKS if isinstance(x := getattr(module, name, None), Tensor)), None)
    given = {"softcap": _SOFTCAP} | dict.fromkeys(SINKS if sinks is not None else (), sinks)
    options = {name: value for name, value in given.items() if name in _passed(type(module))}
    with torch.no_grad():
        try:
            out = own(module, q, k, v, mask, scaling=_SCALE, dropout=0.0, **options)[0].transpose(1, 2)
        except Exception:  # it needs what transformers' functions do not get
            return False
        sinks = None if sinks is None else sinks.detach().flatten()
        spec = AttentionSpec(scale=_SCALE, softcap=options.get("softcap"), sinks=sinks)  # type: ignore[arg-type]
        plain = dense_attention(q, k, v, spec)
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
