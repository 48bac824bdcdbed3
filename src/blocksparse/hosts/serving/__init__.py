"""What engines that serve have in common here: settings, the split of a batch, and attention to its prompts."""
