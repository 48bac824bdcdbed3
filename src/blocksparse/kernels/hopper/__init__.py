"""Parts of the attention kernels for Hopper.

* `arguments`: what warps get: compile-time constants, and pointers, buffers and sizes by name
* `launch`: grids, arguments and constants that two of the kernels share
* `tile_scheduler`: how programs take work items, what stages and barriers are, and the terms for all of it
* `split_kv`: long lists that are split, where a launch has few tiles of queries
* `loaders`: the warps that load
* `consumer`: the warps that compute
* `rows`: scores in a consumer's registers: masks, maxima and sums
* `softmax`: weights of scores, relative to a reference that seldom changes, and softcaps of logits
* `output`: what a consumer writes
* `int8`: scores and weights of 8-bit operands in registers, and one step of a consumer with them
* `gather`: the warps that load keys through index maps, and votes on whether a row of blocks may stop
"""
