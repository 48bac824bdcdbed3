"""One warp that runs the inline PTX of the kernels for Hopper, in numpy: what they compute where there is no GPU.

Only the instructions that these texts have are known. Powers of 2 are exact but for their rounding to fp32, where the
hardware errs by up to 2^-22. All lanes of a warp branch alike, or an assertion fails.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

Lanes = Any  # [32], of any dtype


def _number(text: str) -> float:
    if text.startswith("0f"):
        return float(np.frombuffer(bytes.fromhex(text[2:])[::-1], np.float32)[0])
    return float(text)


def _flushed(x: Lanes) -> Lanes:
    """`x` with 0 in the place of numbers too small for fp32's full precision."""
    return np.where(np.abs(x) < 2.0**-126, np.float32(0.0), x)


def _fused(x: Lanes, y: Lanes, z: Lanes) -> Lanes:
    """`x y + z`, rounded once: float64 holds the products, and rounds sums far below fp32's last place."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _saturated(x: Lanes) -> Lanes:
    return np.where(np.isnan(x), np.float32(0.0), np.clip(x, np.float32(0.0), np.float32(1.0)))


def _quiet(x: Lanes) -> Lanes:
    """`x` with the one NaN that arithmetic on a GPU gives."""
    nan = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    return np.where(np.isnan(x), nan, x) if x.dtype == np.float32 else x


def _rounded(dtype: torch.dtype, high: Lanes, low: Lanes) -> Lanes:
    """`[2, 32]` in fp32: two numbers of 16 bits, the lower half of their register first."""
    return torch.from_numpy(np.stack((low, high))).to(dtype).float().numpy()


_COMPUTE: dict[str, Any] = {
    "mov.f32": lambda x: x,
    "mov.b32": lambda x: x.view(np.float32 if x.dtype == np.uint32 else np.uint32),
    "neg.f32": lambda x: -x,
    "add.f32": lambda x, y: x + y,
    "sub.f32": lambda x, y: x - y,
    "mul.f32": lambda x, y: x * y,
    "fma.rn.f32": _fused,
    "fma.rn.sat.f32": lambda x, y, z: _saturated(_fused(x, y, z)),
    "max.f32": np.fmax,  # beside NaN the other number, as PTX has it
    "ex2.approx.ftz.f32": lambda x: _flushed(np.exp2(_flushed(x).astype(np.float64)).astype(np.float32)),
    "setp.gt.f32": lambda x, y: x > y,
    "setp.lt.f32": lambda x, y: x < y,
    "or.pred": lambda x, y: x | y,
    "selp.f32": lambda x, y, p: np.where(p, x, y),
    "vote.sync.any.pred": lambda x, _: np.full(32, x.any()),
    "shfl.sync.bfly.b32": lambda x, lane, *_: x[np.arange(32) ^ int(lane[0])],
    "cvt.rn.f16x2.f32": lambda x, y: _rounded(torch.float16, x, y),
    "cvt.rn.bf16x2.f32": lambda x, y: _rounded(torch.bfloat16, x, y),
    "shl.b32": lambda x, n: x << np.uint32(n[0]),
    "add.s32": lambda x, y: x + y,
}


def run(text: str, operands: dict[int, Lanes]) -> dict[int, Lanes]:
    """Runs a text on operands by their numbers, and returns all that there are then.

    Raises:
        KeyError: an instruction is not known, or an operand or a register is read before anything was written to it.
    """
    registers: dict[str, Lanes] = {f"${number}": x for number, x in operands.items()}
    body = text.strip().removeprefix("{").removesuffix("}")
    lines = [line.strip() for line in re.sub(r"(\w+):", r"\1:;", body).split(";") if line.strip()]
    lines = [line for line in lines if not line.startswith(".reg")]

    def value(name: str) -> Lanes:
        if re.match(r"-?\d", name):
            return np.full(32, _number(name), np.float32)
        return registers[name]

    at = 0
    with np.errstate(all="ignore"):
        while at < len(lines):
            line, at = lines[at], at + 1
            if jump := re.fullmatch(r"@(!?)(\w+) bra (\w+)", line):
                negated, predicate, label = jump.groups()
                taken = registers[predicate] ^ bool(negated)
                assert taken.all() or not taken.any(), f"lanes part at {line}"
                at = lines.index(f"{label}:") if taken.all() else at
            elif not line.endswith(":"):
                operation, names = line.split(None, 1)
                to, *given = (name.strip() for name in names.split(","))
                registers[to] = _quiet(_COMPUTE[operation](*map(value, given)))
    return {int(name[1:]): x for name, x in registers.items() if name.startswith("$")}
