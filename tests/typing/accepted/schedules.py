"""Schedules and head groups that must type-check, with the types they give."""

from collections.abc import Callable
from typing import assert_type

import torch

import blocksparse as bs
from blocksparse import HeadGroups, Schedule
from blocksparse.layers.head_groups import HeadGroupsTrace, LayerTrace
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe import Audit, AuditedAttention
from blocksparse.observe.density_recorder import DensityRecorder, RecordedAttention

paper = bs.pbs_attn(0.9)
groups = HeadGroups({(0, 1): paper, (2,): None, (3,): bs.mean_pooling()})
by_density = HeadGroups.dense_where((torch.rand(4) > 0.8).tolist(), paper)

Schedule(paper)
Schedule(None, layers={3: paper, 4: groups, 5: None})
Schedule(groups, dense=range(2))
schedule = Schedule(paper, layers={-2: bs.mean_pooling(0.95)}, dense=(0, 1, -1))
by_layer = {layer: HeadGroups({(layer,): None}) for layer in range(3)}
Schedule(paper, layers={**by_layer})
assert_type(schedule.resolve(32), tuple[LayerPipeline | None, ...])

# Groups are called as a pipeline is.
x = torch.rand(1, 4, 8, 16)
assert_type(groups(x, x, x, causal=True, scale=0.1), torch.Tensor)
assert_type(groups.trace(x, x, x), HeadGroupsTrace)

# What attends in a layer has one type, and so has what wraps it.
layers: list[bs.Attention] = [paper, groups]
audited: bs.Attention = AuditedAttention(layers[0], 0, Audit())
recorded: bs.Attention = RecordedAttention(audited, 0, DensityRecorder())
assert_type(recorded(x, x, x, causal=False, sinks=1.0), torch.Tensor)
assert_type(recorded.trace(x, x, x, window=8), LayerTrace)
calls: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [paper, groups]
