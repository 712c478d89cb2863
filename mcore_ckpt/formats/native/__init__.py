"""Reads and writes checkpoints in this package's own format, and also reads such checkpoints from remote stores."""
