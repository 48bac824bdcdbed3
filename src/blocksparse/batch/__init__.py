"""Batches: where the prompts of a call lie in its tensors, or in the pages of a cache."""
