"""Before an engine serves: prefills of nothing, in the sizes by which kernels are compiled and memory is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from blocksparse.batch.pages import PageTable
from blocksparse.hosts.serving.layer import PagedAttention, Prompt
from blocksparse.hosts.serving.settings import ConfigurationError, Settings
from blocksparse.hosts.serving.worth import Worth
from blocksparse.inputs import UnsupportedError
from blocksparse.layers.schedule import LayerPipeline

# 16 blocks of 128 tokens. Triton compiles a kernel for numbers that are multiples of 16, and once more for others.
_ALIGNED = 2048


def sizes(queries: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Queries and keys of requests such that kernels which serve these serve all; the largest first.

    Kernels are compiled for widths of rows of blocks in powers of two, so keys fall by the square root of two.
    They are also compiled once for multiples of 16, of tokens and of blocks, and once for other numbers.

    Args:
        queries: at most, of a step.
        least, most: keys of a request that goes sparse.
    """
    keys = most
    while keys > least:
        aligned = max(keys // _ALIGNED * _ALIGNED, least)
        for N in dict.fromkeys((keys, aligned, max(aligned - 999, least), max(aligned - 1008, least))):
            whole = min(queries, N)
            parts = whole, whole - 999, whole // 2 - 99, *(whole // n + 1 for n in (4, 8, 16, 32)), 65
            yield from ((M, N) for M in dict.fromkeys(parts) if 1 < M <= N)
        keys = int(keys * 2**-0.5)
    yield min(queries, least), least


def pays_from(
    pipeline: LayerPipeline, worth: Worth, settings: Settings, *, queries: int, tokens: int
) -> int | None:
    """The fewest tokens with which a request goes sparse in a step, at most `tokens`; None if none does.

    Its queries are all of its tokens, or the last `queries` of them.
    """

    def sparse(keys: int) -> bool:
        chunk = min(queries, keys)
        if keys < settings.min_tokens or chunk < settings.min_queries:
            return False
        return worth.dense_because(pipeline, chunk, keys) is None

    if not sparse(tokens):
        return None
    below, from_here = 0, tokens
    while from_here - below > 1:
        middle = (below + from_here) // 2
        below, from_here = (below, middle) if sparse(middle) else (middle, from_here)
    return from_here


def warm(
    attention: PagedAttention,
    worth: Worth,
    settings: Settings,
    query: Tensor,
    out: Tensor,
    *,
    tokens: int,
    page_size: int,
) -> float:
    """Prefill once in each size of a request that may go sparse, and take the workspace: the seconds that took.

    All pages are one page here, so that this takes no memory that an engine would not take. On a CPU, where no
    size is compiled for by itself, it is one short prefill.

    Args:
        query, out: `[queries of a step, Hq, D]`. What is in `out` is overwritten.
        tokens: at most, of a request.
        page_size: tokens of a page of the cache.

    Raises:
        ConfigurationError: the executor cannot run here.
    """
    start = time.perf_counter()
    _, heads, _, D = worth.k.shape
    page = worth.k.new_zeros((1, page_size, heads, 2 * D)).transpose(1, 2)
    keys, values = page.split(D, dim=3)  # [1, Hkv, page_size, D], as a cache with one page
    queries = min(len(query), tokens)
    least = pays_from(attention.pipeline, worth, settings, queries=queries, tokens=tokens)
    if least is None:
        return 0.0
    short = min(queries, 256), max(queries, least)
    for M, N in sizes(queries, least, tokens) if query.is_cuda else [short]:
        pages = torch.zeros((1, -(-N // page_size)), dtype=torch.int32, device=query.device)
        table = PageTable(pages, [N], page_size=page_size)
        prompt = Prompt(query[:M], keys, values, table, 0, out[:M], attention.spec(query.shape[1], D**-0.5))
        try:
            attention.attend(prompt)
            if attention.gauges is not None:  # a call that is audited has a trace
                attention.trace(prompt)
        except UnsupportedError as error:
            raise ConfigurationError(
                f"{attention.pipeline!r} of layer {attention.layer} cannot run here: {error.because}. "
                "Ask for another executor, or none."
            ) from None
    if query.is_cuda:
        torch.cuda.synchronize(query.device)
    return time.perf_counter() - start
