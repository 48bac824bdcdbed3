"""Tasks that a model must still solve when it reads sparsely, like RULER's (arXiv 2404.06654), made offline."""
