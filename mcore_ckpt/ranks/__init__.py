"""Knows each rank's place in the parallel layout, and lets ranks agree over a key-value store without collectives."""
