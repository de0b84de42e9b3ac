"""Waybill's SDK for Python: chat events that are never lost, doubled or out of order."""

from . import errors
from ._frames import (
    Conversation,
    ConversationSettings,
    Created,
    Event,
    MessageReceipts,
    Page,
    Presence,
    Receipt,
    Sent,
    Typing,
    UnreadTotals,
)
from ._version import __version__
from .client import Client
from .connection import Timing
from .errors import Closed, Refused, Unanswered, Unconfirmed, WaybillError
from .stats import Stats
from .store import MemoryStore, Outgoing, Saved, Store

__all__ = [
    "Client",
    "Closed",
    "Conversation",
    "ConversationSettings",
    "Created",
    "Event",
    "MemoryStore",
    "MessageReceipts",
    "Outgoing",
    "Page",
    "Presence",
    "Receipt",
    "Refused",
    "Saved",
    "Sent",
    "Stats",
    "Store",
    "Timing",
    "Typing",
    "Unanswered",
    "Unconfirmed",
    "UnreadTotals",
    "WaybillError",
    "__version__",
    "errors",
]
