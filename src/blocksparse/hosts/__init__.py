"""Integrations: how pipelines run inside the models of other libraries."""
