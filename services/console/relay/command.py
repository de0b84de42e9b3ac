"""`waybill relay shards|resume|rewind`."""

from __future__ import annotations

from typing import Annotated

import typer

from services.console.relay import shards as desk
from services.console.terminal import (
    DEFAULT_STATE,
    AsJson,
    StateFolder,
    Who,
    name_of,
    print_json,
    run,
    show,
    table,
)

relay = typer.Typer(
    name="relay", help="The relay's shards: look, let one go on, publish one again.", no_args_is_help=True
)

Shard = Annotated[int, typer.Argument(min=0, max=63, help="Which shard.")]


@relay.command()
def shards(*, as_json: AsJson = False, state: StateFolder = DEFAULT_STATE) -> None:
    """List the shards: who holds them, how far they are, why one stands still."""
    found = run(state, desk.shards)
    if as_json:
        print_json(found)
        return
    columns = ("shard", "relay", "epoch", "lease until", "cursor", "parked rows", "stands still because")
    rows = [
        (
            shard.shard,
            shard.owner,
            shard.epoch,
            shard.lease_until if shard.held or shard.lease_until is None else f"{shard.lease_until} (ended)",
            shard.cursor_id,
            shard.parked,
            shard.stopped_reason and f"{shard.stopped_reason} (since {shard.stopped_at})",
        )
        for shard in found.shards
    ]
    show(table(columns, rows))


@relay.command()
def resume(shard: Shard, *, who: Who = None, as_json: AsJson = False, state: StateFolder = DEFAULT_STATE) -> None:
    """Let a shard go on that stands still."""
    name = name_of(who)
    done = run(state, lambda pool: desk.resume(pool, shard, name))
    if as_json:
        print_json(done)
    else:
        show(f"shard {shard} goes on" if done.changed else f"shard {shard} did not stand still; nothing is changed")


@relay.command()
def rewind(
    shard: Shard,
    from_id: Annotated[int, typer.Argument(metavar="ID", min=1, help="Id of the outbox to begin at.")],
    *,
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Publish a shard again from an id on; readers of Kafka see its records a second time."""
    name = name_of(who)
    done = run(state, lambda pool: desk.rewind(pool, shard, from_id, name))
    if as_json:
        print_json(done)
    else:
        show(f"shard {shard}: the cursor goes back by {done.ids_back}, from {done.cursor_before} to {from_id - 1}")
