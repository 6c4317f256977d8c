"""What the run board keeps beside its sections: records of steps and publishes, requests to the
learner, and settings that were changed while the run goes on.

    REST    ask("checkpoint") ----> hash: the latest request of each action
    learner requests() between two steps, answer(...) when it takes one up, and when it is done
    REST    request("checkpoint"): waiting, working, done, failed, or expired

Each change is one script, which compares what stands before it writes.

Settings are a state, not a message: who applies them reads them when it likes, and says in its own
section which revision it has.
"""

# redis-py leaves its keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from leeway.replay.connection import Link, ScriptSet
from leeway.replay.keys import BoardKeys

MAX_STEPS: Final = 4096
"""Steps whose records are kept, the newest; metrics.jsonl has all."""
MAX_PUBLISHES: Final = 256
"""About how many publishes are kept; publishes.jsonl has all."""

Action = Literal["drain", "checkpoint", "publish"]
"""What the learner can be asked to do."""

RequestState = Literal["waiting", "working", "done", "failed", "expired"]
"""expired: the learner did not take it up before its deadline, and will not."""


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the learner."""

    request_id: str
    action: Action
    asked_at: float
    """Unix time."""
    deadline_at: float
    """Unix time until which the learner may take it up."""
    state: RequestState = "waiting"
    detail: str
    """What is awaited, what was done, or why it failed."""
    answered_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Neither done nor failed nor expired."""
        return self.state in ("waiting", "working")


class LiveSettings(msgspec.Struct, frozen=True):
    """Settings changed since the start of the run."""

    revision: int = 0
    """Goes up by one with each change."""
    values: dict[str, float] = {}
    """By dotted key, such as learner.learning_rate."""
    change_id: str = ""
    """Of the change that made this revision: one that is sent twice is known by it."""


class RunRecords:
    """Part of RunBoard."""

    def __init__(self, keys: BoardKeys, link: Link) -> None:
        self._records = keys
        self._store = link
        self._record_scripts = ScriptSet(link, keys)

    # ---- steps and publishes

    async def append_step(self, line: Mapping[str, Any]) -> None:
        """Keep the metrics of a step under `line["step"]`. A step that is trained again, as after
        a resumption, takes the place of the earlier one and of those behind it.
        """
        step, data = int(line["step"]), msgspec.json.encode(line)
        key, client = self._records.steps, self._store.client

        async def write() -> None:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.zremrangebyscore(key, step, "+inf")
                pipeline.zadd(key, {data: step})
                pipeline.zremrangebyrank(key, 0, -MAX_STEPS - 1)
                await pipeline.execute()

        await self._store.call(write)

    async def steps(self, after: int = 0, count: int = 100) -> list[dict[str, Any]]:
        """Up to `count` records of steps behind step `after`, in order."""
        found = await self._store.call(
            lambda: self._store.client.zrangebyscore(
                self._records.steps, f"({after}", "+inf", start=0, num=count
            )
        )
        return [msgspec.json.decode(data) for data in found]

    async def append_publish(self, publish: Mapping[str, Any]) -> None:
        """Keep one confirmed publish; the oldest are forgotten."""
        fields = {"publish": msgspec.json.encode(publish)}
        await self._store.call(
            lambda: self._store.client.xadd(self._records.publishes, fields, maxlen=MAX_PUBLISHES)
        )

    async def publishes(self, count: int = 20) -> list[dict[str, Any]]:
        """The last `count` publishes, newest first; each with its Unix time `at`."""
        entries = await self._store.call(
            lambda: self._store.client.xrevrange(self._records.publishes, count=count)
        )
        return [
            {**msgspec.json.decode(fields[b"publish"]), "at": int(name.split(b"-")[0]) / 1000}
            for name, fields in entries
        ]

    # ---- requests to the learner

    async def ask(self, action: Action, detail: str, take_up_s: float) -> ControlRequest:
        """Ask the learner, which takes it up between two steps, within `take_up_s`. An open request
        of the same action is returned instead of a second one, whoever asks at the same time.
        """
        now = time.time()
        request = ControlRequest(
            request_id=secrets.token_hex(8),
            action=action,
            asked_at=now,
            deadline_at=now + take_up_s,
            detail=detail,
        )
        stands = await self._record_scripts.run(
            "ask",
            action=action,
            request_id=request.request_id,
            now=now,
            record=msgspec.json.encode(request).decode(),
        )
        return msgspec.json.decode(stands, type=ControlRequest)

    async def request(self, action: Action) -> ControlRequest | None:
        """The latest request of the action; None before the first."""
        return (await self.requests()).get(action)

    async def requests(self) -> dict[str, ControlRequest]:
        """The latest request of each action."""
        found = await self._store.call(lambda: self._store.client.hgetall(self._records.requests))
        return {
            name.decode(): _aged(msgspec.json.decode(data, type=ControlRequest))
            for name, data in found.items()
        }

    async def answer(self, request: ControlRequest, state: RequestState, detail: str) -> bool:
        """Say how far it is; only the learner does. False, and nothing is written, where it is not
        open any more: it has expired, is over, or another has taken its place.
        """
        now = time.time()
        answered = msgspec.structs.replace(request, state=state, detail=detail, answered_at=now)
        return bool(
            await self._record_scripts.run(
                "answer",
                action=request.action,
                request_id=request.request_id,
                now=now,
                record=msgspec.json.encode(answered).decode(),
            )
        )

    # ---- settings

    async def settings(self) -> LiveSettings:
        """Settings changed since the start of the run."""
        data = await self._store.call(lambda: self._store.client.get(self._records.settings))
        return LiveSettings() if data is None else msgspec.json.decode(data, type=LiveSettings)

    async def change_settings(
        self, values: Mapping[str, float], before: LiveSettings
    ) -> LiveSettings | None:
        """Add to the settings `before`, or change them again. The caller has checked the sum. None,
        and nothing is changed, where those that stand are of another revision by now.
        """
        change_id = secrets.token_hex(8)
        changed = LiveSettings(before.revision + 1, {**before.values, **values}, change_id)
        is_written = await self._record_scripts.run(
            "change_settings",
            stands=before.revision,
            record=msgspec.json.encode(changed).decode(),
        )
        return changed if is_written else None


def _aged(request: ControlRequest) -> ControlRequest:
    """What waits behind its deadline is expired, whether or not a learner lives to say so."""
    if request.state != "waiting" or time.time() <= request.deadline_at:
        return request
    detail = "no learner took it up before the deadline; ask again when one trains"
    return msgspec.structs.replace(request, state="expired", detail=detail)
