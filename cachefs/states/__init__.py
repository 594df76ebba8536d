"""What a saved KV state looks like, and where to cut it."""
