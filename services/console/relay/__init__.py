"""The relay's shards as operators see them: who holds them, why one stands still, and publishing one again."""
