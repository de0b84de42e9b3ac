"""Files that only their owner may read: the secrets of a local stack, and what holds one."""

import secrets
from pathlib import Path


def kept(file: Path) -> str:
    """The secret in the file, made on first use. Only the holder of the state folder's lock may call this."""
    if not file.exists():
        replace(file, f"{secrets.token_urlsafe(32)}\n".encode())
    return file.read_text(encoding="ascii").strip()


def replace(file: Path, content: bytes) -> None:
    """Write the file as a whole: a reader finds what was there before or all of the new."""
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_bytes(content)
    draft.replace(file)
