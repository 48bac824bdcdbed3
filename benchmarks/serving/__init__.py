"""vLLM on a GPU, unmodified and with the plugin in turn."""
