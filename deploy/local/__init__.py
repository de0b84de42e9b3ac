"""The embedded stack: real Postgres, Kafka and Valkey as child processes, from wheels and jars."""
