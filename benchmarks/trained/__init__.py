"""What trained models lose and gain: tasks, KL and time to first token of any model folder, dense and sparse."""
