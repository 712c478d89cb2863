"""Bytes <-> disk: file images, readers and writers, the manifest, the commit."""
