"""The pictures of docs/reference/concepts.md, computed, light and dark: `python -m benchmarks.concept_pictures`.

`four-stages` shows a head of the demo's model, SmolLM2-135M, after each stage of a pipeline. `one-meaning` shows,
on 64 random tokens, which pairs of query and key are computed. Half a minute on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.patches import Patch
from torch import Tensor

import blocksparse as bs
from benchmarks.charts import DROPPED, GREEN, ORANGE, SHADES, THEMES, themed
from blocksparse.testing import make_qkv
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.measure import build, measure
from blocksparse.tools.demo.model import convert_smollm2, load
from blocksparse.tools.demo.picture import pooled_attention

LAYER, HEAD, TOKENS = 8, 1, 2048  # the head that the demo shows, and a prompt in which blocks are visible
SEGMENT, BLOCK, PIXELS = 256, 64, 512
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def four_stages(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """One head after each stage, all with the same axes: sorted keys across, queries down."""
    permuter, scorer = bs.SegmentKeySort(SEGMENT, last_q=BLOCK), bs.MeanPoolScorer(BLOCK)
    selector, executor = bs.TopCdf(0.8) | bs.Sink(1), bs.ReferenceExecutor()
    in_text = bs.Pipeline(bs.Identity(), scorer, bs.Everything(), executor)
    trace = bs.Pipeline(permuter, scorer, selector, executor).trace(q, k, v)
    density, share = float(trace.density()), float(trace.covered_mass())
    unsorted, with_sorted = (fewest(x, share) for x in (in_text.trace(q, k, v), trace))

    attention = pooled_attention(trace, 0, pixels=PIXELS).numpy()
    grid, scores = trace.mask.grid, trace.scores
    assert scores.forced is not None  # a row's own segment is
    values, forced, visible, kept = (
        x.expand(1, 1, grid.rows, grid.cols)[0, 0].numpy()
        for x in (scores.values, scores.forced, grid.visible, trace.mask.keep)
    )
    seen = shades(attention, float(attention.max()))
    seen[attention == 0] = 0.0  # no query sees a key here: the paper shows
    scored = shades(values, 1.0)
    scored[forced] = to_rgba(ORANGE)
    chosen = np.zeros((*kept.shape, 4))
    for colour, where in ((DROPPED, visible), (GREEN, kept), (ORANGE, kept & forced)):
        chosen[where] = to_rgba(colour)
    tile = PIXELS // len(kept)
    computed = seen.copy()
    computed[(visible & ~kept).repeat(tile, 0).repeat(tile, 1)] = to_rgba(DROPPED)
    for image in (scored, chosen):
        image[~visible] = 0.0

    figure, panels = plt.subplots(2, 2, figsize=(7.6, 9.0), layout="constrained", sharex=True, sharey=True)
    stages = (
        ("1  Permuter", f"sorts the keys of each segment of {SEGMENT},\nthe most important first", seen),
        ("2  Scorer", f"estimates the attention of each block\nof {BLOCK} x {BLOCK} tokens", scored),
        ("3  Selector", "keeps the blocks with the highest scores,\nand each segment's own blocks", chosen),
        ("4  Executor", "computes exact attention\nover the kept blocks", computed),
    )
    for axes, (stage, does, image) in zip(panels.flat, stages, strict=True):
        axes.imshow(image, extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
        axes.set_title(stage, fontsize=13, pad=34)
        axes.text(0, 1.02, does, transform=axes.transAxes, va="bottom")
        axes.set(xticks=range(0, TOKENS + 1, 1024), yticks=range(0, TOKENS + 1, 1024))
    for lowest, leftmost in zip(panels[1], panels[:, 0], strict=True):
        lowest.set_xlabel("key, after sorting")
        leftmost.set_ylabel("query")
    figure.suptitle(
        f"{density:.0%} of the work covers {share:.1%} of this head's attention", weight="bold", fontsize=14
    )
    legend = [
        Patch(color=SHADES(0.2), label="little attention"),
        Patch(color=SHADES(0.95), label="much attention"),
        Patch(color=GREEN, label="kept block"),
        Patch(color=ORANGE, label="always kept"),
        Patch(color=DROPPED, label="not computed"),
    ]
    figure.legend(
        handles=legend, loc="outside lower center", ncols=5, frameon=False, columnspacing=1.2, handlelength=1.2
    )
    print(f"{share:.1%} of the attention: {unsorted:.0%} of the blocks in text order, {with_sorted:.0%} sorted")
    return figure


def fewest(trace: bs.Trace[bs.GlobalPermutation, Any, Any], share: float) -> float:
    """The fewest blocks that truly hold a share of the attention of each row, as a share of dense attention's."""
    weight = pooled_attention(trace, 0, pixels=TOKENS // BLOCK) * BLOCK  # [rows, cols], each row adds up to 1
    held = weight.sort(-1, descending=True).values.cumsum(-1)
    return float(((held < share).sum(-1) + 1).sum()) / int(torch.ones_like(held).tril().sum())


def one_head(model_folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `[1, 1, N, D]` of one query head, as the model reads the demo's text."""
    convert_smollm2(model_folder)
    model = load(model_folder, device=torch.device("cpu"))
    prompt = build(model.tokenizer, TEXT.read_text(encoding="utf-8"), tokens=TOKENS, depth=0.5)
    qkv = measure(model, prompt, "dense", None, keep_layer=LAYER).qkv
    assert qkv is not None  # it was asked for
    q, k, v = (x.float() for x in qkv)
    kv = HEAD * k.shape[1] // q.shape[1]
    return q[:, HEAD : HEAD + 1], k[:, kv : kv + 1], v[:, kv : kv + 1]


def shades(weight: Any, heaviest: float) -> Any:
    """An image of attention weights, in the same shades for true and estimated ones."""
    norm = LogNorm(heaviest * 1e-4, heaviest, clip=True)
    return SHADES(np.asarray(norm(np.maximum(weight, heaviest * 1e-4))))


def one_meaning() -> Any:
    """64 tokens: the pairs in kept blocks, and the causal ones among them, both over slots."""
    N, block = 64, 8
    q, k, v = make_qkv(Hq=1, Hkv=1, N=N, D=32, seed=1)
    parts = bs.SegmentKeySort(16, last_q=block), bs.MeanPoolScorer(block), bs.TopCdf(0.5), bs.ReferenceExecutor()
    trace = bs.Pipeline(*parts).trace(q, k, v)
    kept = trace.mask.keep[0, 0].repeat_interleave(block, 0).repeat_interleave(block, 1)  # [query, slot]
    order = trace.permutation.k_index
    assert order is not None  # keys were sorted
    pairs = torch.cat([trace.mask.pairs(row) for row in range(trace.mask.grid.rows)], dim=2)[0, 0]  # [query, key]
    attended = pairs[:, order[0, 0, 0].long()]  # [query, slot]
    assert torch.equal(attended, kept & (order[0, 0, 0].long() <= torch.arange(N)[:, None]))

    figure, panels = plt.subplots(1, 2, figsize=(7.6, 4.4), layout="constrained", sharex=True, sharey=True)
    steps = (
        ("Kept blocks", kept, torch.zeros_like(kept)),
        ("Pairs that are computed", attended, kept & ~attended),
    )
    for axes, (title, shown, future) in zip(panels, steps, strict=True):
        image = np.zeros((N, N, 4))
        image[shown.numpy()] = to_rgba(GREEN)
        image[future.numpy()] = to_rgba(DROPPED)
        axes.imshow(image, extent=(0, N, N, 0), interpolation="nearest")
        axes.set(title=title, xticks=range(0, N + 1, 16), yticks=range(0, N + 1, 16))
        for edge in range(block, N, block):
            axes.axhline(edge, color="0.75", linewidth=0.5)
            axes.axvline(edge, color="0.75", linewidth=0.5)
        axes.set_xlabel("slot of the key, after sorting")
    panels[0].set_ylabel("query")
    legend = [
        Patch(color=GREEN, label="kept"),
        Patch(color=DROPPED, label="masked: the key comes after the query"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo-output/SmolLM2-135M-Instruct"))
    arguments = parser.parse_args()
    arguments.model.parent.mkdir(parents=True, exist_ok=True)
    head = one_head(arguments.model)
    for suffix, (paper, ink) in THEMES.items():
        with themed(paper, ink):
            for name, figure in (("four-stages", four_stages(*head)), ("one-meaning", one_meaning())):
                figure.savefig(PICTURES / f"{name}{suffix}.svg", metadata={"Date": None}, dpi=100)
                plt.close(figure)
                print(PICTURES / f"{name}{suffix}.svg")


if __name__ == "__main__":
    main()
