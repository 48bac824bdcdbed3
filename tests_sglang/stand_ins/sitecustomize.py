"""Python runs this at its start. It names the operations of torchvision, without which its import fails.

PyPI has torchvision for GPUs only, whose own operations the CPU build of PyTorch cannot load. SGLang imports it
for pictures, and these tests have none.
"""

from importlib.metadata import version

import torch

if "+cpu" not in version("torchvision"):
    OPERATIONS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATIONS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
