"""The commands of `blocksparse`, and tuning: applications, which the library itself never imports."""
