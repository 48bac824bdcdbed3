"""How much shared memory a kernel that multiplies tiles takes, told before it is compiled; tiles are chosen by this.

It is an upper bound of what Triton's compiler reports. `python -m tests.kernels.compile_ahead` compares the two for every
target and kernel (docs/support.md).
"""

from __future__ import annotations

from collections.abc import Callable

from blocksparse.kernels.common.hardware import Hardware

_SMALL = 3072  # bytes for positions, barriers, and what warps tell each other


def needed(
    hardware: Hardware,
    *,
    held: int = 0,
    loaded: tuple[int, ...],
    stages: int,
    between: int = 0,
    then: int = 0,
    single: bool = False,
    second: bool = False,
) -> int:
    """Bytes of shared memory of a program that multiplies tiles in a loop.

    Args:
        held: bytes of the tile that is loaded once, and multiplied in every step.
        loaded: bytes of each tile that every step loads.
        stages: `num_stages`, over how many steps the compiler spreads a load and the product that waits for it.
        between: bytes of a tile that changes hands between threads within a step.
        then: the same of one that does so when the products of a step are done.
        single: whether these are numbers of fp32, which are multiplied in two parts on NVIDIA's GPUs.
        second: whether what is held is the second operand, which AMD's kernels keep in shared memory as well.
    """
    if single and hardware.is_nvidia:
        held, between, then = 2 * held, 2 * between, 2 * then
    if stages == 1:
        buffers = max(loaded)  # one after the other
    elif hardware.multiplies_from_shared:
        buffers = sum(loaded) * stages  # a product still reads its operands when the next loads begin
    elif hardware.copies_past_registers:
        buffers = sum(loaded) * stages * 17 // 16  # no register holds a tile on its way; rows are padded
    else:
        buffers = sum(loaded) * (stages - 1)
    # Triton 3.8 keeps the second part of a tile that it multiplies in shared memory.
    part = (
        max(loaded) if single and hardware.is_nvidia and stages > 1 and not hardware.multiplies_from_shared else 0
    )
    between += max(part, then)
    if hardware.is_nvidia:
        return held + buffers + between + _SMALL
    if second:
        return held + buffers + between
    return max(held, buffers + between)  # what is held leaves shared memory before the loop begins


def of_attention(
    hardware: Hardware,
    options: dict[str, int],
    row_bytes: int,
    value_bytes: int,
    weight_bytes: int,
    out_bytes: int,
) -> int:
    """The same of attention: a tile of queries is held, one of keys and one of values loaded, weights change hands.

    `row_bytes` are those of a query or key, `value_bytes` those of a value, `weight_bytes` those of a weight, `out_bytes`
    those of an output, a tile of which changes hands at the end.
    """
    M, N, single = options["BLOCK_M"], options["BLOCK_N"], weight_bytes == 4
    # There weights stay in registers, as the first operand of a product may, if each warp has whole rows.
    from_shared, warps = hardware.multiplies_from_shared and not single, options.get("num_warps", 4)
    in_registers = from_shared and 16 * warps <= max(M, 64)
    weight_bytes = 8 if from_shared else weight_bytes
    loop = needed(
        hardware,
        held=M * row_bytes,
        loaded=(N * row_bytes, N * value_bytes),
        stages=options["num_stages"],
        between=0 if in_registers else M * N * weight_bytes,
        single=single,
    )
    return max(loop, M * out_bytes)


def fitted(
    options: dict[str, int], needs: Callable[[dict[str, int]], int], hardware: Hardware, *, rows: bool = True
) -> dict[str, int]:
    """The options of a launch, with smaller tiles and fewer stages while `needs` says that they need too much.

    Options are BLOCK_M, BLOCK_N, num_warps and num_stages, and others, which stay. Without `rows` BLOCK_M stays too. The
    smallest ones are returned even if they do not fit.
    """
    while needs(options) > hardware.shared:
        M, N, stages = options["BLOCK_M"], options["BLOCK_N"], options["num_stages"]
        if stages > 2:
            smaller = {"num_stages": stages - 1}
        elif rows and max(N, 16) < M:
            smaller = {"BLOCK_M": M // 2, "num_warps": min(options["num_warps"], max(M // 32, 4))}
        elif N > 16:
            smaller = {"BLOCK_N": N // 2}
        elif stages > 1:
            smaller = {"num_stages": 1}
        else:
            break
        options = {**options, **smaller}
    return options
