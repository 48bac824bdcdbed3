"""`blocksparse bench`: dense attention against presets, in the user's shapes on the user's machine."""
