"""Stage 1: in which order tokens stand. q, k -> Permutation."""
