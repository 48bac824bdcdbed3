"""Stage 2: scorers say how much each block of (query, key) pairs is worth. q, k, Permutation -> BlockScores."""
