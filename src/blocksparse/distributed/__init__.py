"""Attention of one sequence over many ranks, through `torch.distributed`."""

from blocksparse.distributed.ring import AllGatherKV as AllGatherKV
from blocksparse.distributed.ring import Ring as Ring
from blocksparse.distributed.ulysses import Ulysses as Ulysses
