"""The desk for dead letters: what they are, how they are tried again or discarded, for the API and the command."""
