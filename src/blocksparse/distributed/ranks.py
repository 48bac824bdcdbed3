"""The processes along one dimension of a mesh, what they send each other, and what they must agree on before."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from blocksparse.batch.sequences import Sequences
from blocksparse.check.validators import shown
from blocksparse.execute.executor import AttentionOutput
from blocksparse.inputs import check_inputs
from blocksparse.launch.torch_modes import DTYPES
from blocksparse.layers.head_groups import Heads
from blocksparse.spec import AttentionOptions, AttentionSpec

# torch 2.13 renamed this collective, and warns of the old name; 2.11 has only the old one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@final
@frozen(eq=False)
class Transfer:
    """Messages on their way. Sent tensors must stay as they are, and received ones are unset, until `wait`."""

    _ranks: Ranks
    _what: str
    _works: Sequence[Any]
    _kept: Sequence[Tensor] = ()

    def wait(self) -> None:
        """Wait for all messages; on a GPU the current stream waits, and the host does not."""
        self._ranks.forget(self)
        with self._ranks.answering(self._what):
            for work in self._works:
                work.wait()


@final
@frozen(eq=False)
class Ranks:
    """This process and the others along dimension `dim` of `mesh`.

    Raises:
        TypeError: `mesh` is not a DeviceMesh, or `dim` not a string.
        ValueError: the mesh has no such dimension, or does not hold this process.
        RuntimeError: no process group is initialised.
    """

    mesh: DeviceMesh = field(repr=False)
    dim: str
    group: dist.ProcessGroup = field(init=False, repr=False)
    size: int = field(init=False)
    rank: int = field(init=False)
    _under_way: list[Transfer] = field(init=False, repr=False, factory=list)

    def __attrs_post_init__(self) -> None:
        mesh, dim = self.mesh, self.dim
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"'mesh' must be a DeviceMesh, as init_device_mesh makes one: {type(mesh).__name__}. "
                "Call init_device_mesh()."
            )
        if not isinstance(dim, str):
            raise TypeError(f"'dim' must be the name of a dimension of the mesh: {shown(dim)}")
        names = mesh.mesh_dim_names or ()
        if dim not in names:
            its = ", ".join(map(repr, names)) or "dimensions without names; pass mesh_dim_names"
            raise ValueError(f"the mesh has no dimension {dim!r}. It has {its}.")
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group is initialised. Call torch.distributed.init_process_group(), or make the mesh "
                "with init_device_mesh, after which other ranks can be reached."
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"this process, rank {dist.get_rank()}, is not in the mesh. Call schemes on its ranks alone."
            )
        object.__setattr__(self, "group", mesh.get_group(dim))
        object.__setattr__(self, "size", dist.get_world_size(self.group))
        object.__setattr__(self, "rank", dist.get_rank(self.group))

    @property
    def device(self) -> torch.device:
        """The device whose tensors this process sends."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.accelerator.current_device_index())

    def told(self, numbers: Sequence[int]) -> list[list[int]]:
        """The `numbers` of every rank, in their order; the host waits for them."""
        with self.answering("comparing their inputs"):
            mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
            them = torch.zeros(self.size * len(numbers), dtype=torch.int64, device=self.device)
            _all_gather(them, mine, group=self.group)
            return [list(map(int, row)) for row in them.view(self.size, -1).tolist()]

    def gathered(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to gather `x` `[B, H, N, D]`, of which rank `r` has `lengths[r]` tokens, from all ranks.

        Returns:
            A function that waits for the parts and returns them in the order of ranks.
        """
        # A collective takes parts of one size, so shorter ones are padded.
        mine = pad(x, (0, 0, 0, max(lengths) - x.shape[2])).contiguous()
        them = x.new_empty((self.size, *mine.shape))
        with self.answering("gathering keys and values"):
            work = _all_gather(them.view(-1), mine.view(-1), group=self.group, async_op=True)
        transfer = self._begun("gathering keys and values", [work], [mine])

        def parts() -> list[Tensor]:
            transfer.wait()
            return [part[:, :, :n] for part, n in zip(them, lengths, strict=True)]

        return parts

    def summed(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks; overwrites `x`."""
        with self.answering("adding up densities"):
            dist.all_reduce(x, group=self.group)
        return x

    def from_rank(self, x: Tensor, source: int) -> Tensor:
        """`x` of rank `source`; on other ranks a tensor of the same shape, which is overwritten."""
        with self.answering("sending the last queries"):
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def exchange(
        self, what: str, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> Transfer:
        """Begin to send tensors to ranks, and to receive others from ranks into contiguous tensors.

        Messages between two ranks arrive in the order in which they are listed. What a rank has for itself is
        copied.
        """
        own: list[Tensor] = []
        kept: list[Tensor] = []
        ops: list[dist.P2POp] = []
        for to, x in sends:
            if to == self.rank:
                own.append(x)
                continue
            x = x.contiguous()
            kept.append(x)
            ops.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=to))
        for source, x in receives:
            if source == self.rank:
                x.copy_(own.pop(0))
            else:
                ops.append(dist.P2POp(dist.irecv, x, group=self.group, group_peer=source))
        with self.answering(what):
            works = dist.batch_isend_irecv(ops) if ops else []
        return self._begun(what, works, kept)

    def _begun(self, what: str, works: Sequence[Any], kept: Sequence[Tensor]) -> Transfer:
        transfer = Transfer(self, what, works, kept)
        self._under_way.append(transfer)
        return transfer

    def forget(self, transfer: Transfer) -> None:
        """Note that someone waits for this transfer."""
        if transfer in self._under_way:
            self._under_way.remove(transfer)

    def settle(self) -> None:
        """Wait for all that is under way when a call fails, so that no message of it meets the next call."""
        while self._under_way:
            with suppress(RuntimeError):  # the error of the call says more
                self._under_way[-1].wait()

    @contextmanager
    def answering(self, what: str) -> Iterator[None]:
        """A context in which errors of collectives name rank and task."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of mesh dimension {self.dim!r} got no answer while {what}. Another rank has "
                "raised, died or made another call. Its own error says why."
            ) from error


_SAME = (
    "B", "Hq", "Hkv", "D", "Dv", "dtype", "causal", "scale", "kind of call",
    "softcap, sinks, remaining and sequences", "scheme and pipeline",
)  # fmt: skip


@final
@frozen(eq=False)
class ShardedCall:
    """A call of attention, of which each rank has a part."""

    spec: AttentionSpec  # with the sinks of the heads that this rank has
    with_lse: bool  # then the stages always run; a plain call may be dense where the executor says so
    Hq: int  # heads of the whole call; a rank may have fewer of them
    Hkv: int
    # Gets some heads of this rank and their output of all tokens, part by part, where heads are spread.
    note: Callable[[Heads, AttentionOutput], None] | None = None
    sequences: Sequences | None = None  # prompts that share the tokens of all ranks


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    ranks: Sequence[Ranks],
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """The inputs of this rank in the form that stages take.

    If they are refused, the other ranks are told, so that none of them waits for this one.
    """
    with _telling(*ranks):
        if "sequences" in options:
            raise TypeError(
                "'sequences' are for a plain call of a Ulysses, which has whole prompts of some heads. Call that, "
                "or call once for each prompt."
            )
        if sequences is not None and len(ranks) > 1:
            raise ValueError(
                "'sequences' are for a Ulysses around a pipeline, which has whole prompts of some heads. "
                "Leave them out, or drop the inner scheme."
            )
        # Whether there are enough keys is a question of the whole call: of one rank there may be fewer.
        q, k, v, scale = check_inputs(q, k, v, causal=False, scale=options.get("scale"), sequences=sequences)
        spec = AttentionSpec.of(q.shape[1], scale, options)
        if q.device != (device := ranks[0].device):
            raise ValueError(
                f"q, k and v are on {q.device}, and this rank sends from {device}. Move them with .to(), or "
                "make that the current device first."
            )
    return q, k, v, spec


@contextmanager
def _telling(*ranks: Ranks) -> Iterator[None]:
    """A context in which the other ranks, of a scheme and of those inside, are told of what this rank refuses."""
    try:
        yield
    except Exception:
        for each in ranks:
            each.told([0] * (len(_SAME) + 3))
        raise


def lengths(
    q: Tensor, k: Tensor, v: Tensor, call: ShardedCall, ranks: Sequence[Ranks], *, scheme: object
) -> tuple[list[int], list[int]]:
    """How many queries and how many keys each rank has.

    Args:
        ranks: those of the scheme, and of the schemes inside, whose calls have yet to begin.
    """
    (B, Hq, M, D), (_, Hkv, N, _) = q.shape, k.shape
    spec, (own, *inner) = call.spec, ranks
    with _telling(*ranks):
        if spec.window is not None:  # also of a call in a graph
            raise ValueError(
                f"the call has a sliding window of {spec.window} tokens, and no scheme supports windows. Spread "
                "heads instead (tensor parallel), or call without."
            )
    bits = struct.unpack("<q", struct.pack("<d", spec.scale))[0]
    same = (
        B, Hq, Hkv, D, v.shape[3], DTYPES.index(q.dtype), int(spec.causal), bits, int(call.with_lse),
        _number(spec.softcap, spec.sinks, spec.remaining, call.sequences), _number(scheme),
    )  # fmt: skip
    them = own.told([1, M, N, *same])
    with _telling(*inner):
        for rank, (agreed, *_) in enumerate(them):
            if not agreed:
                raise RuntimeError(
                    f"rank {rank} of mesh dimension {own.dim!r} refused its inputs. Its own error says why."
                )
        for rank, (_, _, _, *its) in enumerate(them):
            if differ := [name for name, x, y in zip(_SAME, them[0][3:], its, strict=True) if x != y]:
                raise ValueError(
                    f"the ranks of mesh dimension {own.dim!r} must make one call with the same "
                    f"{', '.join(differ)}. Rank {rank} differs from rank 0."
                )
    queries, keys = [row[1] for row in them], [row[2] for row in them]
    # Around another scheme these are of a part of the tokens, which may have fewer keys.
    if call.spec.causal and sum(queries) > sum(keys) and call.sequences is None and not inner:
        raise ValueError(
            f"causal attention needs at least as many keys as queries: "
            f"Nq={sum(queries)}, Nk={sum(keys)} over all ranks. Pass the cached keys too."
        )
    return queries, keys


def _number(*values: object) -> int:
    """A number that equal values have in every process; their addresses do not count."""
    return zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", repr(values)).encode())
