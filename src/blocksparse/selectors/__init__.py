"""Stage 3: which blocks are kept. BlockScores -> BlockMask."""
