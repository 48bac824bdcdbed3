"""Each line marked `# E:` must be an error with that text, and no other line may be."""

import torch

import blocksparse as bs
from blocksparse import HeadGroups, Schedule

paper = bs.pbs_attn()

# A stage is no pipeline.
Schedule(bs.TopK(2))  # E: Argument 1 to "Schedule" has incompatible type "TopK"; expected "Pipeline[Any, Any, Any] | HeadGroups | None"
Schedule(paper, layers={0: bs.TopK(2)})  # E: Dict entry 0 has incompatible type "int": "TopK"; expected "int": "Pipeline[Any, Any, Any] | HeadGroups | None"
HeadGroups({(0, 1): paper, (2,): bs.TopK(2)})  # E: Dict entry 1 has incompatible type "tuple[int]": "TopK"; expected "tuple[int, ...]": "Pipeline[Any, Any, Any] | None"

# Layers have one index each, heads a tuple of them.
Schedule(paper, layers={(0, 1): None})  # E: Dict entry 0 has incompatible type "tuple[int, int]": "None"; expected "int": "Pipeline[Any, Any, Any] | HeadGroups | None"
Schedule(paper, dense=0)  # E: Argument "dense" to "Schedule" has incompatible type "int"; expected "Sequence[int]"
Schedule(paper, {0: None})  # E: Too many positional arguments for "Schedule"
HeadGroups({0: paper})  # E: Dict entry 0 has incompatible type "int": "Pipeline[GlobalPermutation, BlockMass, BlockMask]"; expected "tuple[int, ...]": "Pipeline[Any, Any, Any] | None"

# A list by layer says nothing about its length: name the layers.
Schedule(paper, layers=[paper, None])  # E: Argument "layers" to "Schedule" has incompatible type "list[Pipeline[GlobalPermutation, BlockMass, BlockMask] | None]"; expected

# Groups make their own masks, and hold no other groups.
x = torch.rand(1, 4, 8, 16)
HeadGroups({(0,): paper})(x, x, x, None)  # E: Too many positional arguments for "__call__" of "HeadGroups"
HeadGroups({(0,): HeadGroups({(0,): paper})})  # E: Dict entry 0 has incompatible type "tuple[int]": "HeadGroups"; expected
