"""Parts of the attention kernels for Hopper; `tile_scheduler` explains their terms."""
