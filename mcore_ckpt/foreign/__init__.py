"""Checkpoints that other programs wrote, read into the live training state: the way in, never the way out."""
