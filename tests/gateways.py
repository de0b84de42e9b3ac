"""Gateways in the test's own process, clients that keep every frame, conversations written as ingest writes them."""

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import asyncpg
import msgspec
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from deploy.local import ports
from services.gateway.main import serve
from services.gateway.settings import GatewaySettings
from services.ingest.admission import admit
from services.ingest.conversations import Conversations, CreateRequest, plan
from services.ingest.main import serve as serve_ingest
from services.ingest.settings import IngestSettings
from services.ingest.writer import Writer, Written
from shared.auth import Claims, mint
from shared.contracts.sends import SendItem
from shared.kafka import Topics
from shared.postgres import Pool, open_pool
from tests.databases import Database
from tests.relay import Line
from tests.stack import Stores
from tests.waiting import until

SECRET = "tests-secret-tests-secret-tests-secret"
DIGEST_KEY = "tests-digest-key-of-32-characters"

Frame = dict[str, Any]

_names = itertools.count()


def user(name: str) -> str:
    """A user id that no other test has."""
    return f"{name}.{next(_names)}.{uuid.uuid4().hex[:6]}"


def token(user_id: str, **more: Any) -> str:
    return mint(SECRET, user_id, **more)


class Client:
    """A device. Keeps all frames in `got`; acks each event at once if told so."""

    def __init__(self, socket: ClientConnection, *, acks: bool) -> None:
        self.socket = socket
        self.acks = acks
        self.got: list[Frame] = []
        self._reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.socket.close()
        await asyncio.wait([self._reading], timeout=5)

    async def _read(self) -> None:
        try:
            async for text in self.socket:
                frame = json.loads(text)
                self.got.append(frame)
                if self.acks and frame["t"] == "event":
                    await self.ack(frame["conversation_id"], frame["seq"])
        except websockets.ConnectionClosed:
            pass

    async def say(self, t: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"t": t, **fields}))

    async def hello(self, device: str = "phone", **fields: Any) -> None:
        """Say hello and wait until all is listed."""
        await self.say("hello", device_id=device, **fields)
        await self.one("listed")

    async def ack(self, conversation_id: str, *seqs: int) -> None:
        await self.say("ack", conversation_id=conversation_id, ranges=[[seq, seq] for seq in seqs])

    def all(self, t: str, **fields: Any) -> list[Frame]:
        """Every frame of a type so far, with these members."""
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
    """A running gateway."""

    settings: GatewaySettings
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.settings.gateway_port}/v1/socket"

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
        return Client(socket, acks=acks)

    async def client(self, user_id: str, device: str = "phone", *, acks: bool = True, **hello: Any) -> Client:
        """Connect and say hello."""
        made = await self.open(acks=acks)
        await made.hello(device, token=token(user_id), **hello)
        return made

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(asyncio.shield(self.task), 20)


@dataclass
class House:
    """A database, topics and a Redis, and what a test starts on them."""

    database: Database
    stores: Stores
    topics: Topics
    redis_url: str
    owner: asyncpg.Connection
    pool: Pool
    line: Line
    stack: AsyncExitStack
    ingest_port: int = field(default_factory=ports.free_port)

    async def gateway(self, **settings: Any) -> Gateway:
        """Start a gateway; it ends with the test."""
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
        self.stack.push_async_callback(gateway.end)
        await until(lambda: _opens(gateway), timeout=20, what="gateway")
        return gateway

    async def ingest(self, **settings: Any) -> None:
        """Start ingest; it ends with the test."""
        made = IngestSettings(
            **{
                "postgres_url": self.database.url("ingest"),
                "auth_secret": SECRET,
                "digest_key": DIGEST_KEY,
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
        """A group; the first member makes it."""
        return await self._create(
            CreateRequest(kind="group", members=[*members], title=title, history=history), publish
        )  # type: ignore[arg-type]

    async def direct(self, one: str, other: str, *, publish: bool = True) -> str:
        return await self._create(CreateRequest(kind="direct", members=[one, other]), publish)

    async def _create(self, request: CreateRequest, publish: bool) -> str:
        planned = plan(request, request.members[0])
        await Conversations(self.pool, DIGEST_KEY.encode(), 5.0).create(planned)
        if publish:
            await self.line.publish()
        return planned.conversation_id

    async def write(
        self, conversation_id: str, sender: str, body: Any = None, type_: str = "message", target: int | None = None
    ) -> int:
        """Write one event, as ingest would; it is not published yet. Returns its seq."""
        (seq,) = await self._write(conversation_id, sender, [({"x": 1} if body is None else body, type_, target)])
        return seq

    async def messages(self, conversation_id: str, sender: str, count: int) -> list[int]:
        """Write so many messages in one transaction; they are not published yet."""
        return await self._write(conversation_id, sender, [({"n": n}, "message", None) for n in range(count)])

    async def member(self, conversation_id: str, sender: str, action: str, subject: str | None = None) -> int:
        body = {"action": action} | ({} if subject is None else {"user_id": subject})
        return await self.write(conversation_id, sender, body, "member")

    async def _write(self, conversation_id: str, sender: str, events: list[tuple[Any, str, int | None]]) -> list[int]:
        claims = Claims("tests", "service", None, 0.0)
        sends = [
            admit(
                claims,
                msgspec.convert(
                    {
                        "conversation_id": conversation_id,
                        "sender_id": sender,
                        "client_msg_id": uuid.uuid4().hex,
                        "type": type_,
                        "target_seq": target,
                    },
                    SendItem,
                )
                if type_ in ("recall", "delete")
                else SendItem(
                    conversation_id=conversation_id,
                    sender_id=sender,
                    client_msg_id=uuid.uuid4().hex,
                    type=type_,  # type: ignore[arg-type]
                    body=msgspec.Raw(json.dumps(body).encode()),
                    target_seq=target,
                ),
                digest_key=DIGEST_KEY.encode(),
            )
            for body, type_, target in events
        ]
        written = await Writer(self.pool, 5.0).write(sends)
        assert all(isinstance(one, Written) for one in written), written
        return [one.seq for one in written if isinstance(one, Written)]

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


@asynccontextmanager
async def house(database: Database, stores: Stores, prefix: str, redis_url: str) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        owner = await asyncpg.connect(database.owner_url)
        stack.push_async_callback(owner.close)
        pool = await stack.enter_async_context(open_pool(database.url("ingest"), size=2, name="tests"))
        line = await stack.enter_async_context(Line(owner, stores.kafka, prefix))
        yield House(database, stores, Topics(prefix), redis_url, owner, pool, line, stack)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _opens(gateway: Gateway) -> bool:
    if gateway.task.done():
        gateway.task.result()
    return await _listens(gateway.settings.gateway_port)
