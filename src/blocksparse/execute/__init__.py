"""Stage 4: softmax attention over exactly the kept pairs. q, k, v, Permutation, BlockMask -> AttentionOutput."""
