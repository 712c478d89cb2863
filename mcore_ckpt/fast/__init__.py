"""Checkpoints on the nodes of a job: saved, copied to other nodes, found again, and read from where they are."""
