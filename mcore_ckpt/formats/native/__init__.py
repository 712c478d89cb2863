"""The format of this package: the reader of local and remote checkpoints, and the writer."""
