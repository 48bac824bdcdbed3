"""One file per paper: an annotated function that only composes stages."""
