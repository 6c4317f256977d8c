"""The last groups that were played, kept by the API since the buffer forgets what is trained.

It looks into the buffer when somebody asks, at most once every LOOK_S, reads the newest groups that
it has not seen, and keeps the encoded bytes of the last ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from leeway.actors.config import model_dir
from leeway.actors.environment import Question
from leeway.actors.tokens import Tokens
from leeway.replay.archive_buffer import Placed
from leeway.replay.codec import decode
from leeway.replay.errors import LeewayError
from leeway.replay.schema import Group, Trajectory
from leeway.services.api.resources import TrajectoryDetail, TrajectoryItem, TurnDetail
from leeway.services.config import RunConfig
from leeway.services.trajectory_view import Episode, build_episode, is_failed, segments

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
MAX_AT_ONCE: Final = 16
"""Groups read at one look; of more new ones the oldest are passed over."""
MAX_GROUPS: Final = 256
MAX_BYTES: Final = 32 * 2**20


class StoredGroups(Protocol):
    """What this needs of the buffer; replay.archive_buffer.OpenBuffer is the real one."""

    async def records(self) -> list[Placed]: ...
    async def payload(self, placed: Placed) -> bytes | memoryview | None: ...


class Seen(NamedTuple):
    """A trajectory in the list."""

    number: int
    """In the order in which this API has seen them."""
    group_id: str
    item: TrajectoryItem


class RecentGroups:
    """Of one run. One per event loop."""

    def __init__(self, buffer: StoredGroups, config: RunConfig) -> None:
        self._buffer = buffer
        self._config = config
        self._payloads: OrderedDict[str, bytes] = OrderedDict()
        self._known: set[str] = set()
        self._seen: list[Seen] = []
        self._num_bytes = 0
        self._num_seen = 0
        self._looked_at = -LOOK_S
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._questions: Mapping[str, Question] | None = None
        self._tokens: Tokens | None = None

    @property
    def num_seen(self) -> int:
        """Trajectories that were ever in the list: the number of the newest."""
        return self._num_seen

    async def look(self) -> None:
        """Read what is new in the buffer. Raises StoreUnavailable."""
        async with self._lock:
            if time.monotonic() - self._looked_at < LOOK_S:
                return
            self._looked_at = time.monotonic()
            records = await self._buffer.records()
            fresh = [placed for placed in records if placed.group_id not in self._known]
            self._known &= {placed.group_id for placed in records} | set(self._payloads)
            # Those passed over are known too: they would come late, as if they were new.
            self._known |= {placed.group_id for placed in fresh[:-MAX_AT_ONCE]}
            for placed in fresh[-MAX_AT_ONCE:]:
                payload = await self._buffer.payload(placed)
                if payload is not None:
                    await self._take(placed.group_id, bytes(payload))
                # Not before: one that could not be read is read at the next look.
                self._known.add(placed.group_id)

    async def since(self, number: int) -> list[Seen]:
        """Look, and return those behind `number`, oldest first. Whoever asked before, they come."""
        await self.look()
        return [seen for seen in self._seen if seen.number > number]

    def page(self, cursor: int | None, limit: int) -> tuple[list[TrajectoryItem], int | None]:
        """Newest first; those before number `cursor`. Also the cursor of the next page."""
        older = [seen for seen in reversed(self._seen) if cursor is None or seen.number < cursor]
        found = older[:limit]
        return [seen.item for seen in found], found[-1].number if len(older) > limit else None

    async def detail(self, trajectory_id: str) -> TrajectoryDetail | None:
        """One with its turns; None if it is not, or no longer, among the last."""
        seen = next((s for s in self._seen if s.item.trajectory_id == trajectory_id), None)
        if seen is None:
            return None
        payload = self._payloads[seen.group_id]
        # One at a time: the first of them loads the tokenizer.
        async with self._reading:
            return await asyncio.to_thread(self._detail, payload, seen)

    async def _take(self, group_id: str, payload: bytes) -> None:
        try:
            items = await asyncio.to_thread(self._items, payload)
        except LeewayError as error:
            log.warning("group %s is not shown: %s", group_id, error)
            return
        self._keep(group_id, payload, items)

    def _items(self, payload: bytes) -> list[TrajectoryItem]:
        group = decode(payload)
        if self._questions is None:
            self._questions = _questions_of(self._config)
        question = self._questions.get(group.question_id)
        return [_item(group, trajectory, question) for trajectory in group.trajectories]

    def _keep(self, group_id: str, payload: bytes, items: Sequence[TrajectoryItem]) -> None:
        self._payloads[group_id] = payload
        self._num_bytes += len(payload)
        for item in items:
            self._num_seen += 1
            self._seen.append(Seen(self._num_seen, group_id, item))
        while self._payloads and (len(self._payloads) > MAX_GROUPS or self._num_bytes > MAX_BYTES):
            gone, forgotten = self._payloads.popitem(last=False)
            self._num_bytes -= len(forgotten)
            self._seen = [seen for seen in self._seen if seen.group_id != gone]

    def _detail(self, payload: bytes, seen: Seen) -> TrajectoryDetail:
        group = decode(payload)
        wanted = seen.item.trajectory_id
        trajectory = next(t for t in group.trajectories if t.trajectory_id == wanted)
        if self._tokens is None:
            self._tokens = Tokens.load(Path(model_dir(self._config.model)))
        episode = build_episode(trajectory, group.group_id, group.question_id, self._tokens)
        texts = _texts(episode)
        return TrajectoryDetail(
            **dict(seen.item), prompt=texts.get(("prompt", None), ""), turns=_turns(episode, texts)
        )


def _texts(episode: Episode) -> dict[tuple[str, int | None], str]:
    return {
        (part.kind, part.turn): "".join(episode.texts[part.start : part.stop])
        for part in segments(episode)
    }


def _turns(episode: Episode, texts: Mapping[tuple[str, int | None], str]) -> list[TurnDetail]:
    found: list[TurnDetail] = []
    trained = 0
    for k, turn in enumerate(episode.turns):
        versions: Sequence[int] = episode.versions[trained : trained + turn.num_generated] or [0]
        trained += turn.num_generated
        found.append(
            TurnDetail(
                action=turn.action,
                generated=texts.get(("generated", k), ""),
                observed=texts.get(("observed", k), ""),
                num_generated=turn.num_generated,
                num_observed=turn.num_observed,
                reward=turn.reward,
                oldest_version=min(versions),
                newest_version=max(versions),
            )
        )
    return found


def _item(group: Group, trajectory: Trajectory, question: Question | None) -> TrajectoryItem:
    facts: dict[str, Any] = {
        "question": question.question if question else None,
        "golden_answers": list(question.golden_answers) if question else [],
    }
    return TrajectoryItem(
        trajectory_id=trajectory.trajectory_id,
        group_id=group.group_id,
        question_id=group.question_id,
        worker_id=group.worker_id,
        is_failed=is_failed(trajectory.scores, trajectory.reward),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
        duration_s=trajectory.duration_s,
        num_turns=len(trajectory.turns),
        num_tokens=len(trajectory.token_ids),
        num_trained_tokens=trajectory.num_trained_tokens,
        oldest_version=trajectory.oldest_version,
        scores=dict(trajectory.scores),
        **facts,
    )


def _questions_of(config: RunConfig) -> dict[str, Question]:
    """Questions by id; none where their files are not on this machine."""
    from leeway.actors.search.questions import load_sources

    try:
        sources = load_sources(config.data)
    except LeewayError:
        return {}
    return {question.id: question for source in sources for question in source.questions}
