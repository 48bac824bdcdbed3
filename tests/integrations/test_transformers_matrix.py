"""Every decoder, two-part model and model with pictures that transformers can build small, attached to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from tests.integrations.small_models import WORDS, architectures, small_model
from tests.integrations.test_transformers import (
    DENSE_LIMIT,
    _no_grad,
    _one_thread,
    _registries_are_left_as_found,
)

from blocksparse.integrations.transformers import DensityRecorder, attach

__all__ = ["_no_grad", "_one_thread", "_registries_are_left_as_found"]  # fixtures of these tests too

TOKENS, KNOWN = 160, 120  # how long prompts are, and how much of two prompts is the same
ROUNDING = 1e-4  # of the largest logit


def outcome(kind: str) -> str:
    """What comes of an architecture: "sparse", "dense", "refused: ...", "raises: ..." or "not built: ...".

    A built model that is attached to gives what it gives alone, sees no more of the future than alone, and is as
    before when it is detached; or this raises an AssertionError.
    """
    try:
        model = small_model(kind)
        plain = logits(model, PROMPT)
    except Exception as error:  # whatever its config says
        return f"not built: {type(error).__name__}"
    before, recorder = model.config._attn_implementation, DensityRecorder()
    try:
        attachment = attach(model, DENSE_LIMIT, min_tokens=16, min_window=16, recorder=recorder)
    except ValueError as error:
        return f"refused: {' '.join(str(error).split()[1:5])}"
    with attachment:
        try:
            attached = logits(model, PROMPT)
        except ValueError as error:
            assert "while a pipeline is attached" in str(error)
            return "raises"
        ahead = logits(model, OTHER)
    known = slice(KNOWN)
    differs, sees = far(attached, plain), far(ahead[:, known], attached[:, known])
    if max(differs, sees) > ROUNDING:  # of models that amplify it, and of those that see the future by themselves
        allowed = rounding(kind, plain)
        assert differs <= allowed, "attends to something else"
        assert sees <= far(logits(model, OTHER)[:, known], plain[:, known]) + allowed, "sees the future"
    assert torch.equal(logits(model, PROMPT), plain), "is not restored"
    assert model.config._attn_implementation == before
    return "sparse" if recorder.sparse_calls() else "dense"


def logits(model: Any, ids: Tensor) -> Tensor:
    torch.manual_seed(0)  # of models that draw numbers
    if model.config.is_encoder_decoder:
        return model(input_ids=PROMPT, decoder_input_ids=ids, use_cache=False).logits
    return model(input_ids=ids, use_cache=False).logits


def far(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max())


def rounding(kind: str, plain: Tensor) -> float:
    """How far logits may be from one another: twice as far as two implementations in transformers are."""
    model = small_model(kind)
    model.set_attn_implementation("sdpa" if model.config._attn_implementation == "eager" else "eager")
    return max(ROUNDING, 2 * far(logits(model, PROMPT), plain))


PROMPT, OTHER = (torch.randint(5, WORDS - 10, (1, TOKENS), generator=torch.Generator().manual_seed(0)) for _ in "12")
OTHER[:, KNOWN:] = PROMPT[:, KNOWN:].flip(1)
