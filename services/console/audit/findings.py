"""What an audit tells: each difference, and what they come to."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from services.console.audit.rules import NOTED

MOST_TOLD = 1_000
"""Differences that a JSON document holds; the counts are of all."""

_RANGE = re.compile(r"\[(-?\d*),(-?\d*)\)")


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One difference. ``found`` and ``wanted``: a mark, a count, or seqs (`1-3 6`)."""

    kind: str
    conversation_id: str
    mended: bool
    user_id: str | None = None
    device_id: str | None = None
    bucket: int | None = None
    found: str | None = None
    wanted: str | None = None


class Report(msgspec.Struct, kw_only=True):
    """``checked``: users by conversations, or buckets. ``left``: differences that are neither mended nor only noted."""

    checked: int = 0
    differences: Counter[str] = msgspec.field(default_factory=Counter)
    mended: Counter[str] = msgspec.field(default_factory=Counter)
    left: int = 0
    found: list[Finding] = msgspec.field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count one."""
        self.differences[finding.kind] += 1
        if finding.mended:
            self.mended[finding.kind] += 1
        elif finding.kind not in NOTED:
            self.left += 1
        if len(self.found) < MOST_TOLD:
            self.found.append(finding)


def readable(text: str | None) -> str | None:
    """A multirange as Postgres writes it in inclusive ends: `{[1,4),[6,7)}` is `1-3 6`; other text stays."""
    if text is None or not text.startswith("{"):
        return text
    ranges = []
    for low, end in _RANGE.findall(text):
        high = int(end) - 1 if end else None
        ranges.append(low if high is not None and str(high) == low else f"{low}-{'' if high is None else high}")
    return " ".join(ranges)
