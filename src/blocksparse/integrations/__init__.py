"""One file per host library."""
