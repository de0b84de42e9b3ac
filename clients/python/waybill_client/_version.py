"""The version of this SDK, as told to the server."""

__version__ = "0.1.0"
