"""Calls: what one call of attention takes, checked once, and the node that a graph has of it."""
