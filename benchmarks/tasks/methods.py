"""What reads: dense attention, every preset at three settings, the random floor, the oracle of blocks, a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from attrs import evolve, frozen

import blocksparse as bs
from benchmarks.oracle import TrueMassScorer
from benchmarks.quality_settings import SETTINGS
from blocksparse.layers.schedule import LayerPipeline, Schedule
from blocksparse.tools.tune import Plan

ALWAYS_SPARSE = bs.AutoExecutor(dense_below=0)
HAVE_BANDS = ("a_shape", "tri_shape", "bfla")  # another band would add nothing
QUALITIES: tuple[bs.Quality, ...] = ("fast", "balanced", "careful")
FLOOR, CEILING, DENSE = "random", "oracle", "dense"
PLANS = {"density": "plan", "time": "plan for time"}  # by what they minimise


@final
@frozen(eq=False)
class Method:
    """A way to read; `attention` is None for dense attention."""

    preset: str
    setting: str
    attention: LayerPipeline | Schedule | None

    @property
    def name(self) -> str:
        return f"{self.preset} {self.setting}".strip()


def methods(block: int, band: int | None) -> list[Method]:
    """Dense first, then everything kept, random blocks and the oracle, then every preset at three settings.

    What is lost with everything kept is the noise of other kernels.

    Args:
        block: tokens per block.
        band: as further methods, presets with a band so wide on top, where they take one and have none.
    """
    found = [Method(DENSE, "", None)]
    # Everything() would be left out for dense attention.
    found.append(Method("everything", "", _pipeline(bs.NoScorer(block), bs.Threshold(-1.0))))
    for rho in (0.05, 0.1, 0.2, 0.35, 0.6):
        selector: Any = bs.Random(rho) | bs.Sink(1)
        found.append(Method(FLOOR, f"{rho:g}", _pipeline(bs.NoScorer(block), selector)))
    for mass in (0.7, 0.8, 0.9, 0.95):
        found.append(Method(CEILING, f"{mass:g}", _pipeline(TrueMassScorer(block), bs.TopCdf(mass))))
    for setting in SETTINGS:
        pipeline = setting.pipeline(block=block)
        if isinstance(pipeline.executor, bs.AutoExecutor):
            pipeline = evolve(pipeline, executor=ALWAYS_SPARSE)
            if band is not None and setting.preset not in HAVE_BANDS:
                banded = evolve(pipeline, selector=pipeline.selector | bs.Band(band))
                found.append(Method(f"{setting.preset} | Band({band})", setting.label, banded))
        found.append(Method(setting.preset, setting.label, pipeline))
    for quality in QUALITIES:
        found.append(Method("auto", quality, evolve(bs.auto(quality), executor=ALWAYS_SPARSE)))
    for tau in (0.01, 0.03, 0.1):
        found.append(Method("s2o, S=128", f"{tau:g}", bs.s2o(tau, S=128)))
        if band is not None:
            banded = bs.s2o(tau, S=128, band=band)
            found.append(Method(f"s2o, S=128, band={band}", f"{tau:g}", banded))
    return found


def plans(paths: Sequence[Path], network: Any) -> list[Method]:
    """Tuned plans of this model, named as their files are."""
    found = [(path.stem, Plan.load(path)) for path in paths]
    return [Method(PLANS[plan.evidence.minimise], name, plan.schedule(network)) for name, plan in found]


def _pipeline(scorer: Any, selector: Any) -> Any:
    return bs.Pipeline(bs.Identity(), scorer, selector, ALWAYS_SPARSE)
