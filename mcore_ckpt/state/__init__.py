"""What a trainer owns -> named shards, and back."""
