"""Block-sparse attention for the models of ComfyUI, which loads this folder from `custom_nodes`."""

from .node import ModelBlocksparseAttention

NODE_CLASS_MAPPINGS = {"ModelBlocksparseAttention": ModelBlocksparseAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"ModelBlocksparseAttention": "Model Sparse Attention (blocksparse)"}
