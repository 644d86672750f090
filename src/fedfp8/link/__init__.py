"""What it takes to exchange a model in few bytes: once, for every engine and for systems of your own.

`ServerLink` and `ClientLink` remember who holds what, draw the random bits, choose the steps, code and check. They know
no framework and no network: bytes in, bytes out. Start reading at `server.py`.
"""

from fedfp8.errors import LostReference
from fedfp8.link.client import ClientLink
from fedfp8.link.mean import average
from fedfp8.link.server import ServerLink
from fedfp8.link.wire import Wire

__all__ = ["ClientLink", "LostReference", "ServerLink", "Wire", "average"]
