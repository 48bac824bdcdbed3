"""Stage 1: permuters decide the order of the tokens. q, k -> Permutation."""
