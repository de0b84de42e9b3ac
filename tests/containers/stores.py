"""The three servers as containers, through testcontainers."""

import gc
import os
import secrets
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Self

from testcontainers.community.postgres import PostgresContainer
from testcontainers.community.valkey import ValkeyContainer
from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

KAFKA_PORT = 9092
READY_SECONDS = 120

KAFKA_SETTINGS = {
    "NODE_ID": "1",
    "PROCESS_ROLES": "broker,controller",
    "CONTROLLER_LISTENER_NAMES": "CONTROLLER",
    "CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
    "INTER_BROKER_LISTENER_NAME": "INSIDE",
    "LISTENERS": f"OUTSIDE://:{KAFKA_PORT},CONTROLLER://:9093,INSIDE://:9094",
    "LISTENER_SECURITY_PROTOCOL_MAP": "OUTSIDE:PLAINTEXT,CONTROLLER:PLAINTEXT,INSIDE:PLAINTEXT",
    "AUTO_CREATE_TOPICS_ENABLE": "false",
    "GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    "OFFSETS_TOPIC_NUM_PARTITIONS": "4",
    "OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
    "TRANSACTION_STATE_LOG_NUM_PARTITIONS": "4",
    "TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
    "TRANSACTION_STATE_LOG_MIN_ISR": "1",
}


class Addresses(NamedTuple):
    """As the host reaches them."""

    postgres_url: str
    kafka: str
    redis_url: str


class KafkaContainer(DockerContainer):
    """One KRaft node of the image `apache/kafka`.

    A broker tells its clients its address, and the port that Docker maps is known only when the container runs: it
    starts with a shell that waits for a script with that address. (testcontainers' own module knows another image.)
    """

    SCRIPT = "/tmp/start.sh"

    def __init__(self, image: str) -> None:
        wait = f"while [ ! -s {self.SCRIPT} ]; do sleep 0.1; done; exec sh {self.SCRIPT}"
        settings = {f"KAFKA_{name}": value for name, value in KAFKA_SETTINGS.items()}
        super().__init__(image, env=settings, ports=[KAFKA_PORT])
        self.with_command(["sh", "-c", wait])

    def start(self) -> Self:
        super().start()
        listeners = f"OUTSIDE://{address(self, KAFKA_PORT)},INSIDE://localhost:9094"
        script = f"export KAFKA_ADVERTISED_LISTENERS={listeners}\nexec /etc/kafka/docker/run\n"
        self.copy_into_container(script.encode(), self.SCRIPT)
        ready = LogMessageWaitStrategy("Kafka Server started")
        ready.with_startup_timeout(READY_SECONDS).with_poll_interval(0.2).wait_until_ready(self)
        return self


def address(container: DockerContainer, port: int) -> str:
    """`host:port` of a container's port, as the host reaches it."""
    return f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"


def engine_answers() -> bool:
    """Whether a Docker engine is there."""
    with warnings.catch_warnings():
        # Where none is, docker's client forgets the socket that it tried: a ResourceWarning, at the next collection.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return bool(DockerClient().client.ping())
        except Exception:  # noqa: BLE001 - docker's own errors would be a dependency of their own
            return False
        finally:
            gc.collect()


@contextmanager
def started() -> Iterator[Addresses]:
    """The three servers, started side by side, removed at the end. Raises what Docker raises."""
    password = secrets.token_hex(8)
    postgres = PostgresContainer(
        _image("POSTGRES", "postgres:18"), username="waybill", password=password, dbname="waybill", driver=None
    ).with_command(["-c", "wal_level=logical", "-c", "max_connections=200"])
    kafka = KafkaContainer(_image("KAFKA", "apache/kafka:4.4.0"))
    valkey = ValkeyContainer(_image("VALKEY", "valkey/valkey:9"))
    with ExitStack() as stop, ThreadPoolExecutor(3) as pool:
        for container in (postgres, kafka, valkey):
            # Before its start: one that starts and then does not get ready has to go as well.
            stop.callback(container.stop)
        for start in [pool.submit(container.start) for container in (kafka, postgres, valkey)]:
            start.result()
        yield Addresses(
            f"postgres://waybill:{password}@{address(postgres, 5432)}/waybill?sslmode=disable",
            address(kafka, KAFKA_PORT),
            f"redis://{valkey.get_host()}:{valkey.get_exposed_port()}/0",
        )


def _image(name: str, default: str) -> str:
    return os.environ.get(f"WAYBILL_TEST_{name}_IMAGE", default)
