"""Stage 2: what each pair of blocks is worth. q, k, Permutation -> BlockScores."""
