"""Gateways in the test's own process, clients that keep every frame, conversations written as ingest writes them."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import websockets
from prometheus_client import REGISTRY
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from deploy.local import ports
from services.gateway.main import serve
from services.gateway.settings import GatewaySettings
from services.ingest.main import serve as serve_ingest
from services.ingest.settings import IngestSettings
from shared.auth import mint
from shared.kafka import Topics
from tests.databases import Database
from tests.frames import check_frame, check_sent
from tests.relay import Line
from tests.relays import all_records
from tests.rows import DIGEST_KEY, Rows, open_rows, user
from tests.schemas import MismatchError
from tests.stack import Stores
from tests.waiting import until

SECRET = "tests-secret-tests-secret-tests-secret"

Frame = dict[str, Any]

__all__ = ["SECRET", "Client", "Frame", "Gateway", "House", "house", "metric", "token", "user"]


def token(user_id: str, **more: Any) -> str:
    return mint(SECRET, user_id, **more)


def metric(name: str, **labels: str) -> float:
    """A metric of this process, over all its gateways."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


class Client:
    """A device. Keeps all frames in `got`; acks each event at once if told so.

    A frame that is not in the AsyncAPI document is an error of whatever is asked next.
    """

    def __init__(self, socket: ClientConnection, *, acks: bool) -> None:
        self.socket = socket
        self.acks = acks
        self.got: list[Frame] = []
        self._fault: MismatchError | None = None
        self._reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.socket.close()
        await asyncio.wait([self._reading], timeout=5)
        self._check()

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    async def _read(self) -> None:
        try:
            async for text in self.socket:
                frame = json.loads(text)
                self.got.append(frame)
                try:
                    check_frame("in", frame)
                except MismatchError as fault:
                    self._fault = self._fault or fault
                if self.acks and frame["t"] == "event":
                    await self.ack(frame["conversation_id"], frame["seq"])
        except websockets.ConnectionClosed:
            pass

    async def say(self, t: str, **fields: Any) -> None:
        text = json.dumps({"t": t, **fields})
        check_sent(text)
        await self.socket.send(text)

    async def hello(self, device: str = "phone", **fields: Any) -> None:
        """Say hello and wait until all is listed."""
        await self.say("hello", device_id=device, **fields)
        await self.one("listed")

    async def ack(self, conversation_id: str, *seqs: int) -> None:
        await self.say("ack", conversation_id=conversation_id, ranges=[[seq, seq] for seq in seqs])

    def all(self, t: str, **fields: Any) -> list[Frame]:
        """Every frame of a type so far, with these members."""
        self._check()
        return [
            frame
            for frame in self.got
            if frame["t"] == t and all(frame.get(name) == value for name, value in fields.items())
        ]

    async def one(self, t: str, timeout: float = 10, **fields: Any) -> Frame:
        """The first such frame, now or soon."""
        found = await until(lambda: self.all(t, **fields), timeout=timeout, what=f"{t} {fields} among {self.kinds()}")
        return found[0]

    def kinds(self) -> list[str]:
        return [frame["t"] for frame in self.got][-20:]

    def seqs(self, conversation_id: str) -> list[int]:
        """The seqs of events as they came."""
        return [frame["seq"] for frame in self.all("event", conversation_id=conversation_id)]

    async def has(self, conversation_id: str, *seqs: int, timeout: float = 10) -> None:
        """Wait until the events came, and see that they came so and no other way."""
        await until(
            lambda: len(self.seqs(conversation_id)) >= len(seqs),
            timeout=timeout,
            what=f"events {seqs}, got {self.seqs(conversation_id)}",
        )
        assert self.seqs(conversation_id) == list(seqs)

    async def pong(self) -> None:
        """A round trip: everything that the gateway had to say before is here after it."""
        rid = uuid.uuid4().hex
        await self.say("ping", rid=rid)
        await self.one("pong", rid=rid)

    async def closed(self, timeout: float = 10) -> int:
        """Wait for the end; the close code."""
        await asyncio.wait_for(asyncio.shield(self._reading), timeout)
        await self.socket.wait_closed()
        assert self.socket.close_code is not None
        return self.socket.close_code


@dataclass
class Gateway:
    """A running gateway. Its clients end with it."""

    settings: GatewaySettings
    stop: asyncio.Event
    task: asyncio.Task[None]
    clients: list[Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        scheme = "ws" if self.settings.gateway_tls_certificate is None else "wss"
        return f"{scheme}://127.0.0.1:{self.settings.gateway_port}/v1/socket"

    async def opened(self) -> None:
        """Wait until its port is open."""

        async def opens() -> bool:
            if self.task.done():
                self.task.result()
            return await _listens(self.settings.gateway_port)

        await until(opens, timeout=20, what="gateway")

    async def readyz(self) -> Frame | None:
        url = f"http://127.0.0.1:{self.settings.gateway_private_port}/readyz"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return dict(await answer.json())
        except OSError:
            return None

    async def open(self, *, bearer: str | None = None, acks: bool = True, **options: Any) -> Client:
        """Connect, without `hello`."""
        options.setdefault("subprotocols", [Subprotocol("waybill.v1")])
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        socket = await connect(self.url, additional_headers=headers, compression=None, max_size=None, **options)
        client = Client(socket, acks=acks)
        self.clients.append(client)
        return client

    async def client(self, user_id: str, device: str = "phone", *, acks: bool = True, **hello: Any) -> Client:
        """Connect and say hello."""
        made = await self.open(acks=acks)
        await made.hello(device, token=token(user_id), **hello)
        return made

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(asyncio.shield(self.task), 20)

    async def finish(self) -> None:
        """Close every client, and see that each frame was a known one; then end, with nobody left to drain."""
        try:
            for closed in await asyncio.gather(*(client.close() for client in self.clients), return_exceptions=True):
                if closed is not None:
                    raise closed
        finally:
            await self.end()


@dataclass
class House(Rows):
    """A database, topics and a Redis, and what a test starts on them."""

    stores: Stores
    topics: Topics
    redis_url: str
    line: Line
    stack: AsyncExitStack
    ingest_port: int = field(default_factory=ports.free_port)

    async def gateway(self, *, waits: bool = True, **settings: Any) -> Gateway:
        """Start a gateway; it ends with the test. ``waits``: until its port is open."""
        port = ports.free_port()
        made = GatewaySettings(
            **{
                "postgres_url": self.database.url("gateway"),
                "kafka_bootstrap": self.stores.kafka,
                "topic_prefix": self.topics.prefix,
                "redis_url": self.redis_url,
                "auth_secret": SECRET,
                "ingest_url": f"http://127.0.0.1:{self.ingest_port}",
                "gateway_port": port,
                "gateway_private_port": ports.free_port({port}),
                "gateway_name": f"gateway-{port}",
                "gateway_drain_s": 0.5,
                **settings,
            }
        )
        stop = asyncio.Event()
        gateway = Gateway(made, stop, asyncio.create_task(serve(made, stop)))
        self.stack.push_async_callback(gateway.finish)
        if waits:
            await gateway.opened()
        return gateway

    async def ingest(self, **settings: Any) -> None:
        """Start ingest; it ends with the test."""
        made = IngestSettings(
            **{
                "postgres_url": self.database.url("ingest"),
                "auth_secret": SECRET,
                "digest_key": DIGEST_KEY.decode(),
                "ingest_port": self.ingest_port,
                "ingest_private_port": ports.free_port({self.ingest_port}),
                **settings,
            }
        )
        stop = asyncio.Event()
        task = asyncio.create_task(serve_ingest(made, stop))

        async def end() -> None:
            stop.set()
            await asyncio.wait_for(task, 10)

        self.stack.push_async_callback(end)
        await until(lambda: _listens(self.ingest_port), timeout=20, what="ingest")

    async def group(self, *members: str, title: str = "t", history: str = "joined", publish: bool = True) -> str:
        """A group; the first member makes it. Its creation is published unless told otherwise."""
        made = await super().group(*members, title=title, history=history)
        if publish:
            await self.line.publish()
        return made

    async def direct(self, one: str, other: str, *, publish: bool = True) -> str:
        """A direct chat, published like a group."""
        made = await super().direct(one, other)
        if publish:
            await self.line.publish()
        return made

    async def record(self, conversation_id: str, user_id: str, device_id: str, ranges: str) -> None:
        """What receipts would have kept of a device's acks."""
        await self.owner.execute(
            "INSERT INTO device_cursor VALUES ($1, $2, $3, $4::text::int8multirange)"
            " ON CONFLICT (conversation_id, user_id, device_id) DO UPDATE SET delivered = excluded.delivered",
            conversation_id,
            user_id,
            device_id,
            ranges,
        )

    async def head(self, conversation_id: str) -> int:
        """The highest seq in Postgres."""
        found: int = await self.owner.fetchval(
            "SELECT last_seq FROM conversation WHERE conversation_id = $1", conversation_id
        )
        return found

    async def event_id(self, conversation_id: str, seq: int) -> str:
        """Of the event at a seq."""
        return str(
            await self.owner.fetchval(
                "SELECT event_id FROM event WHERE conversation_id = $1 AND seq = $2", conversation_id, seq
            )
        )

    async def settled(self) -> None:
        """Wait until no transaction is open that began before now: a `since` told from here on names none of them."""
        now = int(await self.owner.fetchval("SELECT pg_current_xact_id()::text"))

        async def passed() -> bool:
            return int(await self.owner.fetchval("SELECT pg_snapshot_xmin(pg_current_snapshot())::text")) > now

        await until(passed, timeout=20, what="older transactions")

    async def acks(self, *conversation_ids: str) -> list[Frame]:
        """What gateways wrote to Kafka of these conversations' acks and marks."""
        values = [
            dict(json.loads(record.value or b"")) for record in await all_records(self.stores.kafka, [self.topics.acks])
        ]
        return [value for value in values if value["conversation_id"] in conversation_ids]


@asynccontextmanager
async def house(database: Database, stores: Stores, prefix: str, redis_url: str) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        rows = await stack.enter_async_context(open_rows(database))
        line = await stack.enter_async_context(Line(rows.owner, stores.kafka, prefix))
        of_rows = (database, rows.owner, rows.ingest_pool, rows.receipts_pool)
        yield House(*of_rows, stores, Topics(prefix), redis_url, line, stack)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
