"""Many checkpoints under one root: commit, listing, tracker, retention, pins, locks, and copies in a remote store."""
