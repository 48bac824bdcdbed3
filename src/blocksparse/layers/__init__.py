"""Layers: which pipeline attends where in a model."""
