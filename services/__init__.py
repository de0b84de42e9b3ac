"""The services. None imports another."""
