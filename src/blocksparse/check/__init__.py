"""Checks: what arguments, numbers per head and the types of stages must be."""
