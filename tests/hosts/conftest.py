"""What holds for every test of hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _registries_are_left_as_found() -> Iterator[None]:
    """Those of transformers, where a test imports it."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    before = [dict(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]
    yield
    assert [dict(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)] == before
