"""`auto`, the default preset, and `AutoChoice`, which reports what `auto` does in a call."""

from __future__ import annotations

from math import gcd
from typing import Literal, NamedTuple, final, get_args

from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import one_of, whole
from blocksparse.execute.auto import AutoExecutor, ExecutorChoice
from blocksparse.order.permutation import GlobalPermutation, Permuter
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.presets.video import sparge
from blocksparse.score.combined import SampledQueriesScorer, ScorerByCausality
from blocksparse.score.scorer import BlockMass
from blocksparse.score.strided import AntidiagonalScorer
from blocksparse.select.combined import SelectorByCausality
from blocksparse.select.mass import RowShare
from blocksparse.select.positions import Band, LastQueries

Quality = Literal["careful", "balanced", "fast"]
"""How many blocks `auto` keeps: "careful" more than "balanced", and "fast" fewer."""


class _Settings(NamedTuple):
    alpha: float  # of `RowShare` over sums of cells, in causal calls
    tau: float  # of SpargeAttn, in other calls
    theta: float


# Alphas: docs/evidence/trained-models.md. The last two numbers of "careful" are SpargeAttn's own.
_SETTINGS: dict[str, _Settings] = {
    "careful": _Settings(0.025, 0.98, 0.6),
    "balanced": _Settings(0.034, 0.95, 0.5),
    "fast": _Settings(0.066, 0.9, 0.3),
}
_STRIDE, _BLOCK = 8, 128  # docs/evidence/trained-models.md: cells of 16 change answers at 64K more
_EVERY, _WEIGHT = 64, 0.5  # one query of so many is scored exactly, and what its row holds counts so much
_BAND = 128  # tokens; 64 with "fast" lost more at equal density
_LAST = 128  # queries at the end of a prompt, where a question mostly is; their rows are dense


@kept
def auto(
    quality: Quality = "balanced",
    *,
    alpha: Numbers | None = None,
    block: int = _BLOCK,
    order: Permuter[GlobalPermutation] | None = None,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Return the default preset, with settings chosen on tasks and KL of trained models.

    Causal calls, as in language models, score blocks of 128 tokens by XAttention's sums of cells of 8 x 8 pairs,
    and by the true weights of one query in 64 (`SampledQueriesScorer`), which see single keys that means hide.
    They keep the blocks with a share of their row's mass (`RowShare`), a thin band, and all blocks of the last 128
    queries of the prompt. So a call for a chunk of a prompt needs `remaining`. Other calls, as in models of images
    and video, run `sparge`. `AutoExecutor` attends densely where dense attention is little work, as for short
    prompts on a GPU, and otherwise runs the fastest executor of the device.

    Args:
        quality: `"careful"` keeps more blocks and stays closest to dense attention. `"balanced"` keeps the answers
            of the models that were measured. `"fast"` keeps fewer blocks and may miss a fact.
        alpha: of `RowShare` in causal calls. A number, or one per query head. If None, that of the quality: 0.025,
            0.034 or 0.066. A greater one keeps fewer blocks.
        block: tokens per block in causal calls, a multiple of 8. Other calls have blocks of 128 x 64.
        order: a permuter, `HilbertOrder(grid)` for images and video. `Identity()` if None.
        executor: `AutoExecutor()` if None.
    """
    one_of(*get_args(Quality)).check(quality=quality)
    settings = _SETTINGS[quality]
    share = RowShare(settings.alpha if alpha is None else alpha)
    cells, every = AntidiagonalScorer(_STRIDE, block=block, pattern="sum"), gcd(_EVERY, whole(block))
    scorer = SampledQueriesScorer(cells, every, _WEIGHT * every / _STRIDE)
    pictures = sparge(settings.tau, settings.theta, order=order)
    rule = SelectorByCausality(share | (Band(_BAND) | LastQueries(_LAST)), pictures.selector)
    return preset(pictures.permuter, ScorerByCausality(scorer, pictures.scorer), rule, executor)


@final
@frozen
class AutoChoice:
    """The decision of `auto` for one call, with its reason; as text, one sentence."""

    preset: str  # as Python
    because: str
    density: float  # mean over heads; 1 where attention is dense
    runs: ExecutorChoice  # by which executor, or densely

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        quality: Quality = "balanced",
        causal: bool = True,
        scale: float | None = None,
    ) -> AutoChoice:
        """Make a call of `auto(quality)` with `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]`, `v` `[B, Hkv, N, Dv]`."""
        executor = AutoExecutor()
        trace = auto(quality, executor=executor).trace(q, k, v, causal=causal, scale=scale)
        alpha, tau, theta = _SETTINGS[quality]
        return cls(
            f"Pipeline(Identity(), SampledQueriesScorer(AntidiagonalScorer({_STRIDE}, pattern='sum'), {_EVERY}, "
            f"{_WEIGHT * _EVERY / _STRIDE}), "
            f"RowShare({alpha}) | Band({_BAND}) | LastQueries({_LAST}), AutoExecutor())"
            if causal
            else f"sparge({tau}, {theta})",
            "the call is causal, as in language models" if causal else "the call is not causal, as in video",
            float(trace.density().mean()),
            executor.choose(trace.q, trace.k, trace.v, trace.mask, trace.spec),
        )

    def __str__(self) -> str:
        if self.runs.dense_because is not None:
            return f"{self.runs}; a longer call takes {self.preset}, because {self.because}"
        return f"{self.preset}, because {self.because}: density {self.density:.3f}; {self.runs}"
