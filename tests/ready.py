"""Ready frames, read back."""

from collections.abc import Iterator


def payloads(frames: bytes) -> Iterator[bytes]:
    """The payloads of server frames that follow each other."""
    at = 0
    while at < len(frames):
        assert frames[at] == 0x81, "not a whole text frame"
        length, at = frames[at + 1], at + 2
        if length in (126, 127):
            size = 2 if length == 126 else 8
            length, at = int.from_bytes(frames[at : at + size], "big"), at + size
        yield frames[at : at + length]
        at += length
    assert at == len(frames)
