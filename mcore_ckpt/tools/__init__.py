"""What works without a trainer: merge, convert, reshard, compare, verify, prune."""
