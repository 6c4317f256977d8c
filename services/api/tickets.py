"""Tickets: slots that an outside agent holds, sealed so that it cannot change them.

The buffer trusts a worker to hand back the slot as it was granted: with an older version in it, a
group beyond the staleness bound would reach the learner and end the run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

import msgspec

from leeway.replay.errors import DataError
from leeway.replay.store import Slot

_SEAL_BYTES: Final = 16


def seal(slot: Slot, secret: bytes) -> str:
    """The ticket of a slot."""
    content = msgspec.json.encode(slot)
    return base64.urlsafe_b64encode(_seal(content, secret) + content).decode()


def unseal(ticket: str, secret: bytes) -> Slot:
    """The slot of a ticket. Raises DataError for one that this run did not grant."""
    try:
        raw = base64.urlsafe_b64decode(ticket.encode())
        seal_, content = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
        if hmac.compare_digest(seal_, _seal(content, secret)):
            return msgspec.json.decode(content, type=Slot)
    except (binascii.Error, ValueError):
        pass
    raise DataError("ticket: it was not granted by this run; get one with POST /v1/slots")


def _seal(content: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES, key=secret).digest()
