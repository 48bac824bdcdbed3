"""The picture: where one head looks, and which blocks are kept, before and after the keys are sorted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack, final

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.execute.reference import ReferenceExecutor
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.pipeline import Pipeline
from blocksparse.spec import AttentionOptions
from blocksparse.values import Trace

_PIXELS = 480
_FAINTEST = 1e-4  # of the heaviest weight; all below looks alike

AnyPipeline = Pipeline[GlobalPermutation, Any, Any]


@final
@frozen(eq=False)
class Panel:
    """One attention map with the blocks that are kept of it."""

    name: str
    attention: Tensor  # [P, P] mean weight per pixel, keys in slot order
    keep: Tensor  # [rows, cols] bool
    block: int  # tokens per block
    tokens: int
    keys: str  # in which order they stand
    density: float
    covered_mass: float

    @classmethod
    def of(
        cls,
        name: str,
        pipeline: AnyPipeline,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        head: int,
        **options: Unpack[AttentionOptions],
    ) -> Panel:
        """Map of `pipeline` in query head `head` of `q` `[1, Hq, N, D]`, `k`, `v` `[1, Hkv, N, D]`.

        Sinks, which are no keys, are not among the `options` of the call.
        """
        group = q.shape[1] // k.shape[1]
        kv, inside = divmod(head, group)
        q, k, v = q[:, kv * group : (kv + 1) * group], k[:, kv : kv + 1], v[:, kv : kv + 1]
        # Only the choice is looked at, and the reference needs no compiler.
        trace = evolve(pipeline, executor=ReferenceExecutor()).trace(q, k, v, **options)
        return cls(
            name,
            pooled_attention(trace, inside, pixels=_PIXELS),
            trace.mask.per_query_head()[0, inside].cpu(),
            trace.mask.grid.k_block,
            q.shape[2],
            "key, in the order of the text" if trace.permutation.k_index is None else "key, in sorted order",
            float(trace.density()[0, inside]),
            float(trace.covered_mass()[0, inside]),
        )

    def colours(self, norm: Any) -> Any:
        """The map as an image, `[P, P, 4]`: kept blocks in colour, dropped ones in grey, the future white."""
        kept_map, dropped_map = _colour_maps()
        weight = self.attention.numpy()
        pixels = len(weight)
        tile = -(-self.tokens // pixels)
        centre = (torch.arange(pixels) * tile + tile // 2).clamp_max(self.tokens - 1) // self.block
        kept = self.keep[centre][:, centre].numpy()
        strength = norm(np.maximum(weight, norm.vmin))
        image = np.where(kept[..., None], kept_map(strength), dropped_map(strength))
        image[(weight == 0) & ~kept] = 1.0
        return image


def pooled_attention(trace: Trace[GlobalPermutation, Any, Any], head: int, *, pixels: int) -> Tensor:
    """True attention of one query head, keys in slot order, mean weight over tiles: at most `[pixels, pixels]`."""
    q, k = trace.q[0, head].float(), trace.k[0, head * trace.k.shape[1] // trace.q.shape[1]].float()
    N = len(k)
    order = (
        torch.arange(N, device=q.device)
        if trace.permutation.k_index is None
        else trace.permutation.k_index[0, 0, 0].long()
    )
    tile = -(-N // pixels)
    edges = torch.arange(0, N, tile)
    tokens = torch.diff(edges, append=torch.tensor([N]))
    map_rows = []
    for start in edges.tolist():
        logits = trace.spec.capped(q[start : start + tile] @ k.T * trace.spec.scale)  # [tile, N]
        position = torch.arange(start, min(start + tile, N), device=q.device)
        seen = trace.mask.grid.is_visible(position[:, None], torch.arange(N, device=q.device))
        logits = logits.masked_fill(~seen, float("-inf"))
        weight = logits.softmax(-1).mean(0)[order]  # [N]
        summed = weight.new_zeros(len(edges)).index_add_(0, torch.arange(N, device=q.device) // tile, weight)
        map_rows.append(summed.cpu() / tokens)
    return torch.stack(map_rows)


def draw(panels: list[Panel], path: Path, *, title: str) -> None:
    """Write the panels side by side as a PNG: kept blocks in colour, dropped ones in grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(6.6 * len(panels) + 0.9, 7.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    heaviest = max(float(panel.attention.max()) for panel in panels)
    norm = LogNorm(vmin=heaviest * _FAINTEST, vmax=heaviest, clip=True)
    for axis, panel in zip(axes, panels, strict=True):
        extent = (0, panel.tokens, panel.tokens, 0)
        axis.imshow(panel.colours(norm), extent=extent, interpolation="nearest")
        axis.set(xlabel=panel.keys, ylabel="query")
        axis.set_title(
            f"{panel.name}\n{panel.density:.0%} of the work covers {panel.covered_mass:.1%} of the attention"
        )
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    kept, dropped = _colour_maps()
    legend = [
        Patch(color=kept(0.3), label="kept block"),
        Patch(color=dropped(0.5), label="dropped block"),
        Patch(facecolor="white", edgecolor="0.6", label="white: keys after the query, which it never sees"),
    ]
    axes[-1].legend(handles=legend, loc="upper right", frameon=False)
    figure.colorbar(ScalarMappable(norm, kept), ax=axes, shrink=0.75, label="attention weight (mean over a pixel)")
    figure.suptitle(title, fontsize="x-large")
    figure.savefig(path, dpi=130)


def _colour_maps() -> tuple[Any, Any]:
    """Colour maps of kept and dropped blocks; darker means more attention."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # Kept and dropped blocks must differ from the white future even where they hold next to nothing.
    kept = ListedColormap(colormaps["YlOrRd"](np.linspace(0.03, 1.0, 256)))
    return kept, ListedColormap(colormaps["Greys"](np.linspace(0.09, 0.9, 256)))
