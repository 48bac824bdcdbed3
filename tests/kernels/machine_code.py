"""The order of instructions in the machine code of Hopper's kernels, which their speed rests on and no result shows.

Branches in the PTX of `hopper/softmax.py` keep ptxas from moving instructions across them. Another ptxas
might drop these branches or ignore them, so `wrong_order` looks at what it made.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import triton

from blocksparse.kernels.hopper.softmax import _APART

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
PART = int(_APART.value)
Code = list[tuple[int, str]]  # addresses and instructions


def assembled(ptx: str, ptxas: str, cubin: Path) -> None:
    """An older `ptxas` reads text of its own version."""
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 12" in version:
        ptx = re.sub(r"^\.version 9\..*", ".version 8.7", ptx, flags=re.MULTILINE)
    text = cubin.with_suffix(".ptx")
    text.write_text(ptx)
    subprocess.run([ptxas, "-lineinfo", "--gpu-name=sm_90a", str(text), "-o", str(cubin)], check=True)


def machine_code(cubin: Path) -> Code:
    """The instructions of a kernel, as `cuobjdump` lists them."""
    command = [str(TOOLS / "cuobjdump"), "-sass", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", listing)]


def _words(text: str) -> list[str]:
    """The name of an instruction and what qualifies it: `MUFU` and `EX2`."""
    return re.sub(r"^@\S+ ", "", text).split()[0].split(".")


def _target(text: str) -> int | None:
    """The address that a branch leads to."""
    to = re.search(r"BRA\S*\s+(?:\S+,\s*)?0x([0-9a-f]+)", text)
    return int(to[1], 16) if to else None


def loops(code: Code) -> list[tuple[int, int]]:
    """Of each loop that multiplies and contains no other: its powers, and those behind its last wait."""
    ends = [(to, at) for at, text in code if (to := _target(text)) is not None and to < at]
    inner = [x for x in ends if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in ends)]
    found = []
    for first, last in sorted(inner):
        words = [_words(text) for at, text in code if first <= at <= last]
        if any("GMMA" in name for name, *_ in words):
            waits = [i for i, x in enumerate(words) if x[:2] == ["WARPGROUP", "DEPBAR"]]
            powers = [i for i, x in enumerate(words) if x[:2] == ["MUFU", "EX2"]]
            found.append((len(powers), sum(i > max(waits, default=0) for i in powers)))
    return found


def parts(code: Code, number: int) -> list[list[tuple[int, int, int]]]:
    """Powers, sums and fused products before each of `number` + 1 branches to one place, wherever there are such.

    Counting begins where the instructions before the first branch can be reached from elsewhere.
    """
    branches = {i: to for i, (at, text) in enumerate(code) if (to := _target(text)) is not None}
    ways: dict[int, list[int]] = {}
    for i, to in branches.items():
        if to > code[i][0] and code[i][1].startswith("@"):
            ways.setdefault(to, []).append(i)
    targets = set(branches.values())
    borders = {*branches, *(i - 1 for i, (at, _) in enumerate(code) if at in targets)}
    found = []
    for way in ways.values():
        if len(way) == number + 1:
            edges = [max((i for i in borders if i < way[0]), default=-1), *way]
            words = [[_words(text) for _, text in code[i + 1 : j]] for i, j in pairwise(edges)]
            counts = [Counter("EX2" if x[:2] == ["MUFU", "EX2"] else x[0] for x in part) for part in words]
            if any(x["EX2"] for x in counts):
                found.append([(x["EX2"], x["FADD"], x["FFMA"]) for x in counts])
    return found


def wrong_order(code: Code, *, consumers: int, scores: int) -> list[str]:
    """What is not in the order that `hopper/softmax.py` asks for, in words.

    All powers of a step stand before its wait for the product with values. Of `scores` weights in fp32 of a thread (0 if
    weights are rounded at once), the sums of a part of `PART` stand behind all its powers, beside those of the next part, and
    the logits of a part stand before the powers of the part before it end.

    Args:
        consumers: groups of warps that compute; each has code of its own.
    """
    hot = [behind for powers, behind in loops(code) if powers]
    wrong = [f"{behind} powers stand behind the last wait" for behind in hot if behind]
    if len(hot) != consumers:
        wrong.append(f"{len(hot)} loops have products and powers, not {consumers}")
    if number := scores // PART:
        logits = [2 * PART, *[PART] * (number - 2), 0, 0]
        want = list(zip([PART] * number + [0], [0] + [PART] * number, logits, strict=True))
        found = parts(code, number)
        wrong += [f"powers, sums and logits between branches are {x}, not {want}" for x in found if x != want]
        if len(found) != consumers:
            wrong.append(f"{len(found)} pieces of code have {number} parts between branches, not {consumers}")
    return wrong
