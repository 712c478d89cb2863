"""Saves checkpoints on the nodes of a job, copies them to other nodes, finds them again, and reads them."""
