"""Whom a server runs as. Postgres refuses to run as root, so root's own runs as `nobody`."""

import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Account:
    """A user without root's rights for one server; `None` everywhere stands for the caller's own."""

    owner: tuple[int, int] | None = None
    """(uid, gid) that the server's files belong to."""
    identity: tuple[int, int] | None = None
    """(uid, gid) that the child is started with; None when `prefix` changes it, or nothing does."""
    prefix: tuple[str, ...] = ()
    """Goes before the server's own command."""


def unprivileged(home: Path, program: Path) -> Account:
    """The caller's own account, or, for root, the one that owns `home`, or `nobody` if that is root or not there yet.

    Where a folder above `home` or `program` is closed to that account (a clone in root's home folder), the server runs
    through `setpriv` with the one capability that lets it pass. Raises `OSError` when that tool is missing.
    """
    if os.geteuid() != 0:
        return Account()
    found = home.stat() if home.exists() else None
    if found is not None and found.st_uid != 0:
        owner = (found.st_uid, found.st_gid)
    else:
        nobody = pwd.getpwnam("nobody")
        owner = (nobody.pw_uid, nobody.pw_gid)
    if _open_to_all(home.parent) and _open_to_all(program):
        return Account(owner, identity=owner)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise OSError(f"{home} or {program} is closed to user id {owner[0]}, and setpriv (of util-linux) is not there")
    capability = "+dac_override"
    return Account(
        owner,
        prefix=(
            setpriv,
            f"--reuid={owner[0]}",
            f"--regid={owner[1]}",
            "--clear-groups",
            f"--inh-caps={capability}",
            f"--ambient-caps={capability}",
            "--",
        ),
    )


def _open_to_all(path: Path) -> bool:
    return all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.resolve().parents))
