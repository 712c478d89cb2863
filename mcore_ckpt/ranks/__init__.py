"""Knows where a rank stands in the parallel layout, and lets the ranks agree over a key-value store."""
