"""Waybill's SDK for Python: chat events that are never lost, doubled or out of order."""

from . import errors
from ._frames import Conversation, Created, Event, Page, Presence, Receipt, Sent, Typing
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
    "Created",
    "Event",
    "MemoryStore",
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
    "WaybillError",
    "__version__",
    "errors",
]
