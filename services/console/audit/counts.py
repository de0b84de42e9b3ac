"""Counts of finished buckets, which unread counters are made of, against the events themselves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from services.console.audit.findings import Finding, Report
from services.console.audit.marks import patiently
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.postgres import Pool

_SQL = statements(__file__)
_BUCKETS = _SQL["buckets"]
_DIFFERENCES = _SQL["differences"]
_MEND = _SQL["mend"]

BATCH = 50
"""Buckets, of some hundred events each, that are counted in one statement."""

KIND = "count_wrong"

_LOWEST, _HIGHEST = UUID(int=0), UUID(int=2**128 - 1)


async def check(
    pool: Pool, conversation_id: UUID | None, who: str, told: Callable[[Finding], None], *, repair: bool = False
) -> Report:
    """Count every bucket that is said to be counted once more; ``told`` of each difference as it is found.

    One with a difference is looked at again under its conversation's lock, and counted anew if that is asked for.
    Raises `UnavailableError` if the store stays away.
    """
    report = Report()
    after, last = (conversation_id or _LOWEST, -1), conversation_id or _HIGHEST
    while rows := await patiently(partial(pool.fetch, _BUCKETS, *after, last, BATCH)):
        keys = [(row["conversation_id"], row["bucket"]) for row in rows]
        after = keys[-1]
        report.checked += len(keys)
        suspects = await patiently(
            partial(pool.fetch, _DIFFERENCES, [key[0] for key in keys], [key[1] for key in keys])
        )
        for suspect in suspects:
            conversation, bucket = suspect["conversation_id"], suspect["bucket"]
            for row in await patiently(partial(pool.fetch, _MEND, conversation, bucket, repair, who)):
                finding = Finding(
                    kind=KIND,
                    conversation_id=str(conversation),
                    user_id=row["sender_id"] or None,
                    bucket=bucket,
                    found=str(row["found"]),
                    wanted=str(row["wanted"]),
                    mended=row["mended"],
                )
                report.add(finding)
                told(finding)
    return report
