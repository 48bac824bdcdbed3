"""The pictures of docs/reference/concepts.md, computed, light and dark: `python -m benchmarks.concept_pictures`.

One follows a head of the demo's model, SmolLM2-135M, through the four stages of a pipeline. The other spells out,
on 64 random tokens, which pairs of query and key a permutation and a block mask mean. Half a minute on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm, to_rgba
from torch import Tensor

import blocksparse as bs
from benchmarks.charts import BLUE, ORANGE, THEMES, themed
from blocksparse.demo import TEXT
from blocksparse.demo.measure import measure
from blocksparse.demo.model import convert_smollm2, load
from blocksparse.demo.picture import Panel, pooled_attention
from blocksparse.demo.prompt import build
from blocksparse.testing import make_qkv

LAYER, HEAD, TOKENS = 8, 1, 2048  # the head that the demo shows, and a prompt in which blocks are visible
SEGMENT, BLOCK = 256, 64
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def four_stages(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """One head: true attention, its permuted view, a score per block, and the blocks that are kept."""
    permuter, scorer = bs.SegmentKeySort(SEGMENT, probe=BLOCK), bs.MeanPoolScorer(BLOCK)
    selector, executor = bs.TopCdf(0.8) | bs.Sink(1), bs.ReferenceExecutor()
    in_text = bs.Pipeline(bs.Identity(), scorer, bs.Everything(), executor)
    in_slots = bs.Pipeline(permuter, scorer, bs.Everything(), executor)
    pipeline = bs.Pipeline(permuter, scorer, selector, executor)
    true, permuted, kept = (Panel.of("", x, q, k, v, head=0) for x in (in_text, in_slots, pipeline))
    share = kept.covered_mass

    figure, panels = plt.subplots(2, 2, figsize=(7.6, 8.1), layout="constrained", sharex=True, sharey=True)
    heaviest = float(max(true.attention.max(), permuted.attention.max()))
    norm = LogNorm(heaviest * 1e-4, heaviest, clip=True)
    traces = [x.trace(q, k, v) for x in (in_text, in_slots)]
    images = seen(true, norm), seen(permuted, norm), scored(traces[1].scores), seen(kept, norm)
    before, after = (fewest(trace, share) for trace in traces)
    titles = (
        f"The head: {share:.1%} of its attention\nlies in {before:.0%} of the blocks",
        f"1  Permuter: keys that matter first\nin each {SEGMENT}: now in {after:.0%}",
        "2  Scorer: a number for each block\n(orange: kept whatever it is)",
        "3, 4  Selector, executor:\nattend to these (grey: dropped)",
    )
    for axes, image, title in zip(panels.flat, images, titles, strict=True):
        axes.imshow(image, extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
        axes.set(title=title, xlabel="slot", xticks=range(0, TOKENS + 1, 512), yticks=range(0, TOKENS + 1, 512))
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_xlabel("key, in the order of the text")
    for axes in panels[:, 0]:
        axes.set_ylabel("query")
    gist = f"With its keys sorted, {kept.density:.0%} of the work holds {share:.1%} of the attention"
    figure.suptitle(gist, weight="bold")
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


def scored(scores: bs.BlockScores) -> Any:
    """An image: values in shades, forced blocks in one colour, nothing where no query can look."""
    assert scores.forced is not None  # a row's own segment is
    values, forced, reachable = (
        x.expand(1, 1, scores.grid.rows, scores.grid.cols)[0, 0].numpy()
        for x in (scores.values, scores.forced, scores.grid.reachable)
    )
    image = colormaps["viridis_r"](LogNorm(1e-4, 1.0, clip=True)(np.maximum(values, 1e-4)))
    image[forced] = to_rgba(ORANGE)
    image[~reachable] = 0.0  # the paper shows
    return image


def seen(panel: Panel, norm: Any) -> Any:
    """An attention map; where no query looks, the paper shows."""
    image = panel.colours(norm)
    image[panel.attention.numpy() == 0] = 0.0
    return image


def one_meaning() -> Any:
    """64 tokens: kept blocks over slots, the same pairs over tokens, and what causality leaves of them."""
    N, block = 64, 8
    q, k, v = make_qkv(Hq=1, Hkv=1, N=N, D=32, seed=1)
    parts = bs.SegmentKeySort(16, probe=block), bs.MeanPoolScorer(block), bs.TopCdf(0.5), bs.ReferenceExecutor()
    trace = bs.Pipeline(*parts).trace(q, k, v)
    kept = trace.mask.keep[0, 0].repeat_interleave(block, 0).repeat_interleave(block, 1)  # [query, slot]
    order = trace.permutation.k_index
    assert order is not None  # keys were sorted
    pairs = torch.zeros_like(kept)
    pairs[:, order[0, 0, 0].long()] = kept  # [query, key]
    meant = torch.cat([trace.mask.pairs(row) for row in range(trace.mask.grid.rows)], dim=2)[0, 0]
    assert torch.equal(meant, pairs.tril())

    figure, panels = plt.subplots(1, 3, figsize=(7.6, 3.1), layout="constrained", sharey=True)
    steps = (
        ("1  Kept blocks, as slots", "slot", kept, torch.zeros_like(kept)),
        ("2  The same, as tokens", "key", pairs, torch.zeros_like(kept)),
        ("3  Without the future", "key", meant, pairs & ~meant),
    )
    for axes, (title, label, shown, dropped) in zip(panels, steps, strict=True):
        image = np.zeros((N, N, 4))
        image[shown.numpy()] = to_rgba(BLUE)
        image[dropped.numpy()] = to_rgba(ORANGE)
        axes.imshow(image, extent=(0, N, N, 0), interpolation="nearest")
        axes.set(title=title, xlabel=label, xticks=range(0, N + 1, 16), yticks=range(0, N + 1, 16))
        for edge in range(block, N, block):
            axes.axhline(edge, color="0.75", linewidth=0.5)
            if shown is kept:
                axes.axvline(edge, color="0.75", linewidth=0.5)
    panels[0].set_ylabel("query")
    figure.suptitle("Kept blocks of slots are pairs of tokens, and none looks ahead", weight="bold")
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
