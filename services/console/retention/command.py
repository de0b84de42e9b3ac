"""`waybill retention list|set|clear`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from services.console.retention import ages, policies
from services.console.terminal import (
    DEFAULT_STATE,
    AsJson,
    StateFolder,
    Who,
    fail,
    name_of,
    print_json,
    run,
    show,
    table,
)
from shared.errors import BadRequestError

KEEP = "keep"

retention = typer.Typer(
    name="retention",
    help="After which age bodies of messages are erased for good: look, set, take away.",
    no_args_is_help=True,
)

Conversation = Annotated[
    str | None, typer.Option("--conversation", help="Of this conversation; default: of all that have no policy.")
]


class Done(msgspec.Struct, frozen=True):
    """``changed``: whether it was otherwise before."""

    conversation_id: str | None
    age_s: int | None
    changed: bool


@retention.command("list")
def list_(*, as_json: AsJson = False, state: StateFolder = DEFAULT_STATE) -> None:
    """List the policies: of all conversations, and of single ones."""
    found = run(state, policies.listing)
    if as_json:
        print_json(found)
        return
    columns = ("conversation", "age", "set by", "set at")
    rows = [(one.conversation_id or "all others", _age(one.age_s), one.set_by, one.set_at) for one in found.policies]
    show(table(columns, rows) if rows else "No policies: nothing is erased.", _round(found))


def _age(age_s: float | None) -> str:
    return KEEP if age_s is None else ages.text(age_s)


def _round(found: policies.Policies) -> str:
    if found.is_under_way:
        return f"a round through all conversations is under way since {found.round_begun_at}"
    if found.round_ended_at is None:
        return "no round yet"
    return f"the last round through all conversations ended at {found.round_ended_at}"


@retention.command("set")
def set_(
    age: Annotated[str, typer.Argument(help=f"Such as 90d, 12h or 30m; `{KEEP}`: bodies are never erased by age.")],
    *,
    conversation: Conversation = None,
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Have bodies erased at an age. What is older goes within the next round."""
    try:
        age_s = None if age == KEEP else ages.seconds(age)
    except BadRequestError as error:
        fail(f"age: {error.message}")
    name = name_of(who)
    changed = run(state, lambda pool: policies.set_policy(pool, conversation, age_s, name))
    if as_json:
        print_json(Done(conversation, age_s, changed))
    else:
        show(f"set to {age}" if changed else f"it was {age} before; nothing is changed")


@retention.command()
def clear(
    *,
    conversation: Conversation = None,
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Take a policy away; what it has erased stays erased."""
    name = name_of(who)
    changed = run(state, lambda pool: policies.clear_policy(pool, conversation, name))
    if as_json:
        print_json(Done(conversation, None, changed))
    else:
        show("cleared" if changed else "there was none; nothing is changed")
