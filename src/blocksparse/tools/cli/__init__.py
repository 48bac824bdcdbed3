"""The command `blocksparse`: one file per subcommand, each with `add_to`, which says what it takes and runs."""
