"""How the two consumers of a program on Hopper take turns in starting matrix products.

Products of one consumer are to run beside the softmax of the other. Left alone, both may start theirs at the same time, wait for
them together, and then share the unit for powers of 2. So each waits with the scores of its next keys until those of the
other are there. Both consumers of a program compute the same number of steps (`hopper/queue.py`), and so as many turns.

A turn is a named barrier of the hardware, which opens when the 128 threads that wait for it and the 128 that give it
have come. Triton takes the first few of the 16 that there are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _barrier(operation, consumer):
    return f"bar.{operation} {14 + int(consumer)}, 256; mov.b32 $0, $1;"


@gluon.jit
def await_turn(WG: gl.constexpr, step):
    """Waits until it is the turn of consumer `WG`; `step` is any number."""
    gl.inline_asm_elementwise(_barrier("sync", WG), "=r,r", [step], gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_turn(WG: gl.constexpr, step):
    """Gives the turn to the consumer that is not `WG`."""
    gl.inline_asm_elementwise(_barrier("arrive", 1 - WG), "=r,r", [step], gl.int32, is_pure=False, pack=1)
