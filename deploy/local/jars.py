"""Kafka's jars from Maven's central repository, each pinned by its SHA-256.

`python -m deploy.local.jars > deploy/local/kafka.jars` resolves the coordinates anew and writes the pins.
"""

import fcntl
import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jgo
from jgo.config import GlobalSettings
from jgo.constants import MAVEN_CENTRAL_URL
from jgo.maven import Artifact, MavenContext

COORDINATES = (
    "org.apache.kafka:kafka_2.13:4.4.0",
    # Kafka's own jars bring no binding for slf4j: without one its log stays empty.
    "org.slf4j:slf4j-simple:1.7.36",
)

DOWNLOAD_TRIES = 3

PINS = Path(__file__).with_name("kafka.jars")


class WrongJarError(RuntimeError):
    """A downloaded jar is not the pinned one."""


def cache_folder(fallback: Path) -> Path:
    """Where jars are kept: `WAYBILL_CACHE`, else `waybill` in the user's cache, else, if that is closed, `fallback`."""
    if named := os.environ.get("WAYBILL_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "waybill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return folder if os.access(folder, os.W_OK) else fallback


def fetch(cache: Path) -> list[Path]:
    """The pinned jars in the cache folder, downloaded where they are missing or damaged.

    Safe to call from several processes at once. Raises `WrongJarError`, and what the download raises.
    """
    folder = cache / "jars"
    folder.mkdir(parents=True, exist_ok=True)
    pins = _read_pins()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The downloader writes in place; a draft folder keeps half a jar of a killed run out of the cache.
        with tempfile.TemporaryDirectory(dir=folder, prefix="draft-") as draft, ThreadPoolExecutor(8) as pool:
            settings = GlobalSettings.load()
            context = MavenContext(
                repo_cache=Path(draft),
                remote_repos={**settings.repositories, "central": MAVEN_CENTRAL_URL},
                timeout=60,
            )
            return list(pool.map(lambda pin: _one(context, folder, *pin), pins))


def _one(context: MavenContext, folder: Path, sha256: str, coordinate: str) -> Path:
    group, name, version = coordinate.split(":")
    jar = folder / f"{name}-{version}.jar"
    if jar.exists() and _sha256(jar) == sha256:
        return jar
    draft = _download(context.project(group, name).at_version(version).artifact())
    if (found := _sha256(draft)) != sha256:
        raise WrongJarError(f"{coordinate} has SHA-256 {found}; {PINS.name} wants {sha256}")
    return draft.replace(jar)


def _download(artifact: Artifact) -> Path:
    for _ in range(DOWNLOAD_TRIES - 1):
        try:
            return artifact.resolve()
        except OSError:
            # What a broken connection left would pass for the whole jar at the next try.
            if artifact.cached_path is not None:
                artifact.cached_path.unlink(missing_ok=True)
    return artifact.resolve()


def _read_pins() -> list[tuple[str, str]]:
    lines = [line.split() for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    return [(sha256, coordinate) for sha256, coordinate in lines]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _resolve() -> list[str]:
    """A line per jar that `COORDINATES` need, in about half a minute: it reads the model of each project."""
    jars = jgo.resolve("+".join(COORDINATES))
    return [f"{_sha256(jar.resolve())}  {jar.groupId}:{jar.artifactId}:{jar.version}" for jar in jars]


if __name__ == "__main__":
    print(f"# {' '.join(COORDINATES)} and all that they need; made by python -m deploy.local.jars")
    print("\n".join(sorted(_resolve(), key=lambda line: line.split()[1])))
