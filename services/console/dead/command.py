"""`waybill dead list|show|retry|discard`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from services.console.dead import changes, letters, tables
from services.console.dead.schemas import MAX_IDS, STATES, Changes, Filter
from services.console.terminal import DEFAULT_STATE, AsJson, StateFolder, Who, name_of, print_json, run, show

if TYPE_CHECKING:
    from services.console.dead.schemas import Change, Page
    from shared.postgres import Pool

dead = typer.Typer(
    name="dead",
    help="Dead letters: records that Kafka refused for good, or that a consumer could not process. List them, look at "
    "one, try again, give up.",
    no_args_is_help=True,
)

Conversation = Annotated[str | None, typer.Option("--conversation", help="Of this conversation.")]
Event = Annotated[str | None, typer.Option("--event", help="Of this event.")]
Shard = Annotated[int | None, typer.Option("--shard", min=0, max=63, help="Of this shard.")]
Origin = Annotated[
    str | None, typer.Option("--origin", help="`outbox`, or the topic that a consumer read them from (`acks.v1`).")
]


@dead.command("list")
def list_(
    *,
    only: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help=f"{', '.join(STATES)}; may be said several times.")
    ] = None,
    conversation: Conversation = None,
    event: Event = None,
    shard: Shard = None,
    origin: Origin = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="The oldest first; default: the newest.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=letters.MAX_LIMIT, help="At most so many.")] = 50,
    after: Annotated[str | None, typer.Option(help="Go on behind a page: its `next`.")] = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """List dead letters."""

    async def work(pool: Pool) -> Page:
        wanted = Filter(tuple(only or ()), conversation, event, shard, origin)
        return await letters.page(pool, wanted, newest=not oldest, after=after, limit=limit)

    page = run(state, work)
    if as_json:
        print_json(page)
    else:
        show(*tables.listing(page))


@dead.command("show")
def show_(
    letter: Annotated[str, typer.Argument(help="A letter's number, or an event's id: its newest letter.")],
    *,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Show a letter: payload, headers, every attempt and action, where it went."""
    found = run(state, lambda pool: letters.show(pool, letter))
    if as_json:
        print_json(found)
    else:
        show(*tables.detail(found))


@dead.command()
def retry(
    ids: Annotated[list[int] | None, typer.Argument(metavar="LETTER", help="Letters' numbers.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All dead ones that match, the oldest first.")] = False,
    conversation: Conversation = None,
    event: Event = None,
    shard: Shard = None,
    origin: Origin = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_IDS, help="With --all: at most so many.")] = 100,
    wait: Annotated[float | None, typer.Option(min=0, help="Wait so many seconds for what becomes of them.")] = None,
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Try letters again; exit code 1 if one is refused, or after --wait dead again."""
    if bool(ids) == every:
        raise typer.BadParameter("name letters, or --all")
    if not every and (conversation, event, shard, origin) != (None, None, None, None):
        raise typer.BadParameter("--conversation, --event, --shard and --origin go with --all")
    name = name_of(who)

    async def work(pool: Pool) -> list[Change]:
        if every:
            wanted = Filter(conversation_id=conversation, event_id=event, shard=shard, origin=origin)
            made = await changes.retry_matching(pool, wanted, name, cap=limit)
        else:
            made = await changes.retry(pool, ids or (), name)
        return made if wait is None else await changes.settled(pool, made, wait)

    _end(run(state, work), as_json=as_json)


@dead.command()
def discard(
    ids: Annotated[list[int], typer.Argument(metavar="LETTER", help="Letters' numbers.")],
    *,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the letter.")],
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Give letters up for good: they stay to be looked at, and are not tried again."""
    name = name_of(who)
    _end(run(state, lambda pool: changes.discard(pool, ids, reason, name)), as_json=as_json)


def _end(made: list[Change], *, as_json: bool) -> None:
    if as_json:
        print_json(Changes(made))
    elif not made:
        show("No dead letters.")
    for change in made:
        if change.failed:
            print(f"waybill: {tables.outcome(change)}", file=sys.stderr)
        elif not as_json:
            show(tables.outcome(change))
    if any(change.failed for change in made):
        raise typer.Exit(1)
