"""Kafka to sockets, and acks and sends back. Keeps no truth: a session is a set of cursors."""
