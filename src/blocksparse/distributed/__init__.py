"""Attention of one sequence over many ranks, through `torch.distributed`."""

from blocksparse.distributed.ulysses import Ulysses as Ulysses
