"""Checks: what arguments, numbers per head and class lines of stages must be."""
