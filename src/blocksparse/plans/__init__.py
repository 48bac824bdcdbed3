"""Plans: files that say what attends in each layer of one model, and how it was found."""
