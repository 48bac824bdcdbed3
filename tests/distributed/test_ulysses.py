from __future__ import annotations

import attrs, torch, sys
from torch.distributed.device_mesh import init_device_mesh
import blocksparse as bs
from blocksparse.distributed import Ulysses
from blocksparse.testing import make_qkv
from tests.distributed.processes import on_ranks
from tests.distributed.watched import compare


def work(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("heads",))
    import traceback
    for p in (bs.pbs_attn(0.7, block=16, S=32), bs.flex_prefill(block=16) , bs.mean_pooling([.5,.6,.7,.8], block=16)):
        for kw in dict(Hkv=2), dict(Hkv=4,B=2), dict(Hkv=2,M=75):
            try:
                compare(lambda p: Ulysses(p, mesh, "heads"), p, make_qkv(**kw))
                print(rank, "ok", kw)
            except Exception:
                traceback.print_exc()
                

def test_it():
    print(on_ranks(2, work, 2))
