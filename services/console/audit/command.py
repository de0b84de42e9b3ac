"""`waybill check receipts|counts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.console.audit import counts as count_audit
from services.console.audit import marks
from services.console.terminal import DEFAULT_STATE, AsJson, StateFolder, Who, name_of, print_json, run, show, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.console.audit.findings import Finding, Report
    from shared.postgres import Pool

check = typer.Typer(
    name="check", help="Compare what is stored with what it is made from, and mend it.", no_args_is_help=True
)

Conversation = Annotated[str | None, typer.Option("--conversation", help="Only this conversation.")]
Repaired = Annotated[bool, typer.Option("--repair", help="Mend what is found; each repair is written down.")]


@check.command()
def receipts(
    *,
    conversation: Conversation = None,
    user: Annotated[str | None, typer.Option("--user", help="Only this user.")] = None,
    repair: Repaired = False,
    lower: Annotated[
        bool,
        typer.Option("--lower", help="With --repair: also lower delivered marks that are ahead of what devices hold."),
    ] = False,
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Compare delivered and read marks with the cursors of devices; exit code 0 only if no difference is left.

    Safe on a live system. Ranges that no device holds any more are told, and are no difference.
    """
    if lower and not repair:
        raise typer.BadParameter("--lower goes with --repair")
    how = marks.Repair(name_of(who), repair, lower)

    async def work(pool: Pool) -> Report:
        return await marks.check(pool, marks.scope_of(conversation, user), how, _teller(as_json=as_json))

    _end(run(state, work), "users' marks", as_json=as_json)


@check.command()
def counts(
    *,
    conversation: Conversation = None,
    repair: Repaired = False,
    who: Who = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Count events that count as unread once more; exit code 0 only if no difference is left. Safe on a live system."""
    name = name_of(who)

    async def work(pool: Pool) -> Report:
        scope = marks.scope_of(conversation, None)
        told = _teller(as_json=as_json)
        return await count_audit.check(pool, scope.conversation_id, name, told, repair=repair)

    _end(run(state, work), "buckets", as_json=as_json)


def _teller(*, as_json: bool) -> Callable[[Finding], None]:
    return (lambda _: None) if as_json else (lambda finding: show(line(finding)))


def line(finding: Finding) -> str:
    """A difference as a person reads it."""
    where = [
        finding.conversation_id,
        finding.user_id,
        finding.device_id and f"on {finding.device_id}",
        None if finding.bucket is None else f"bucket {finding.bucket}",
    ]
    what = finding.found or f"lacks {finding.wanted}"
    if finding.found and finding.wanted:
        what = f"{finding.found} should be {finding.wanted}"
    return f"{finding.kind}: {' '.join(filter(None, where))}: {what}{', mended' if finding.mended else ''}"


def _end(report: Report, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        kinds = sorted(report.differences)
        rows = [(kind, report.differences[kind], report.mended[kind]) for kind in kinds]
        parts = [table(("difference", "found", "mended"), rows)] if rows else []
        show(*parts, f"{report.checked} {what} checked, {report.left} differences left")
    if report.left:
        raise typer.Exit(1)
