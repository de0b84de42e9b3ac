"""Outbox to Kafka: leases on shards, ordered publishing, cursors."""
