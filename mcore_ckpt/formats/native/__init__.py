"""Our own format: readers of local and remote checkpoints, and the writer."""
