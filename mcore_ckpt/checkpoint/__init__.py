"""Describes one checkpoint on disk: file names, manifest, index and `.pt` files, and locates damage in them."""
