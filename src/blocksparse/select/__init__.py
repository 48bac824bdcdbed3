"""Stage 3: selectors decide which blocks are kept. BlockScores -> BlockMask."""
