"""What candidates might lose where the model was not run with them, from the errors of their attention."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from blocksparse.tune.unit import Key

_EXPONENT = 2.0  # a KL grows with the square of a small change; the losses that are known may say otherwise
_LEAST_ERROR = 1e-3  # errors below are all the same


def hoped_losses(
    known: Mapping[Key, float], errors: Mapping[Key, float], families: Mapping[str, str], least: float
) -> dict[Key, float]:
    """What every candidate would lose in every unit if it lost a standard deviation less than is likely.

    Errors order the settings of one preset in one layer. They tell neither layers nor presets apart: a model minds
    what some layers get wrong more than it minds others, and `s2o` has the least error and loses most at answers.
    So the logarithm of a loss is taken for the sum of a number for its unit, one for its preset, a multiple of the
    logarithm of the error, a constant, and chance, which makes it larger or smaller by a factor of e. If nothing
    were known, all numbers but the constant would be 0, and the multiple 2, give or take 1. Bayesian linear
    regression follows: likely is the least-squares fit to the known losses with one more row for each number, and
    its variance is that of chance and that of the fit. So hope is greatest where least is known of a unit or a
    preset.

    Args:
        known: losses of some units and candidates, at least one.
        errors: relative L1 distances of all units and candidates from dense attention.
        families: the preset of each candidate.
        least: losses below this one are all the same.
    """
    units = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit, _ in errors))}
    presets = {preset: len(units) + number for number, preset in enumerate(dict.fromkeys(families.values()))}
    exponent = len(units) + len(presets)

    def rows(keys: list[Key]) -> np.ndarray:
        table = np.zeros((len(keys), exponent + 2))
        for row, (unit, name) in zip(table, keys, strict=True):
            row[[units[unit], presets[families[name]]]] = 1.0
            row[exponent:] = np.log(max(errors[unit, name], _LEAST_ERROR)), 1.0
        return table

    seen, every = rows(list(known)), rows(list(errors))
    beyond = np.log(np.maximum(list(known.values()), least)) - _EXPONENT * seen[:, exponent]
    spread = np.linalg.inv(seen.T @ seen + np.diag([1.0] * (exponent + 1) + [0.0]))
    likely = every @ spread @ (seen.T @ beyond) + _EXPONENT * every[:, exponent]
    deviation = np.sqrt(1.0 + np.einsum("ki,ij,kj->k", every, spread, every))
    # Rounded, so that the last bits of another machine's arithmetic do not change a plan.
    return dict(zip(errors, np.exp((likely - deviation).round(6)).tolist(), strict=True))
