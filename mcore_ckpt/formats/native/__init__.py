"""Reads and writes checkpoints in this package's own format, and reads them from remote stores, too."""
