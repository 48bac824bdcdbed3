"""What the attention kernels for Hopper are made of.

launch           grids, arguments and constants that two of the kernels share
queue            how programs take their work, what stages and barriers are, and the words for all of it
shares           long lists cut into shares, where a launch has few tiles of queries
loaders          the warps that load
consumer         the warps that compute
rows             scores in a consumer's registers: masks, maxima and sums
softmax          weights of scores, beside a reference that seldom changes
turns            how two consumers start their matrix products in turn
softcap          softcaps of logits, and powers of capped ones
output           what a consumer writes
int8_rows        scores and weights of 8-bit operands in registers
int8_step        one step of a consumer with 8-bit operands
gather_loader    the warps that load keys through index maps
gather_votes     how consumers agree that a row of blocks may stop
"""
