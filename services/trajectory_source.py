"""Where trajectories are read from: a buffer, an exported buffer, or a result of `leeway eval`.

Whatever it is, it gives groups one after another, and the choice is made while they come: memory
holds what is shown and no more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from leeway.actors.config import model_dir
from leeway.actors.environment import Question
from leeway.replay.archive import MAGIC, ArchiveReader
from leeway.replay.codec import decode
from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.replay.schema import Group, Trajectory
from leeway.services.evaluation.journal import read_last
from leeway.services.evaluation.settings import EPISODES_FILE, SETTINGS_FILE, read_settings
from leeway.services.layout import RunDirectory, open_run
from leeway.services.trajectory_view import is_failed

if TYPE_CHECKING:
    from leeway.replay.archive_buffer import OpenBuffer
    from leeway.services.config import RunConfig


@dataclass(frozen=True)
class Choice:
    """Which trajectories to show."""

    limit: int
    group: str | None = None
    """The start of a group's id."""
    trajectory: str | None = None
    """The start of a trajectory's id."""
    question: str | None = None
    """The start of a question's id, or words of its text, whatever their case."""
    benchmark: str | None = None
    """Where the question comes from."""
    failed: bool = False

    def has_group(self, group_id: str) -> bool:
        return self.group is None or group_id.startswith(self.group)

    def has_question(self, question_id: str, question: Question | None) -> bool:
        if self.benchmark and (question is None or question.data_source != self.benchmark):
            return False
        if self.question is None or question_id.startswith(self.question):
            return True
        return question is not None and self.question.casefold() in question.question.casefold()

    def has_trajectory(self, trajectory: Trajectory, scores: Mapping[str, float]) -> bool:
        if self.trajectory and not trajectory.trajectory_id.startswith(self.trajectory):
            return False
        return not self.failed or is_failed(scores, trajectory.reward)


class Found(NamedTuple):
    """One chosen trajectory, or a question that was never played to its end."""

    group: Group | None
    trajectory: Trajectory | None
    question: Question | None
    error: str | None = None
    scores: Mapping[str, float] | None = None
    """Those of an evaluation, or the trajectory's own; None without a trajectory."""


@dataclass
class Chosen:
    """What was chosen from a source."""

    name: str
    """Of the source, for a title."""
    found: list[Found] = field(default_factory=list)
    num_groups: int = 0
    """Groups that were looked at."""
    is_cut: bool = False
    """The limit was reached; there may be more."""
    model: Path | None = None
    """The folder whose tokenizer reads the tokens; None for an archive."""
    run: RunDirectory | None = None

    def take(
        self,
        group: Group,
        question: Question | None,
        choice: Choice,
        scores: Sequence[Mapping[str, float]] | None = None,
    ) -> bool:
        """Add what the choice wants of a group; False when there is no room for more."""
        self.num_groups += 1
        if not choice.has_group(group.group_id):
            return True
        if not choice.has_question(group.question_id, question):
            return True
        for i, trajectory in enumerate(group.trajectories):
            of_it = scores[i] if scores is not None else trajectory.scores
            if choice.has_trajectory(trajectory, of_it):
                if len(self.found) == choice.limit:
                    self.is_cut = True
                    return False
                self.found.append(Found(group, trajectory, question, scores=of_it))
        return True

    def take_error(self, question: Question, error: str | None, choice: Choice) -> bool:
        """Add a question that failed, where no trajectory was asked for by its id."""
        self.num_groups += 1
        wanted = choice.has_question(question.id, question)
        if not wanted or choice.trajectory or choice.group:
            return True
        if len(self.found) == choice.limit:
            self.is_cut = True
            return False
        self.found.append(Found(None, None, question, error))
        return True


def read_source(source: Path, choice: Choice) -> Chosen:
    """What the choice wants of `source`. Raises ConfigurationError for what is none."""
    if source.is_file():
        return _read_archive(source, choice)
    if (source / SETTINGS_FILE).is_file():
        return read_evaluation(source, choice)
    if (source / "config.toml").is_file():
        return _read_run(open_run(source), choice)
    raise ConfigurationError(
        f"{source} {'does not exist' if not source.exists() else 'holds no trajectories'}; give a"
        " run directory, a file of leeway replay export, or a folder of leeway eval"
    )


def _read_archive(path: Path, choice: Choice) -> Chosen:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ConfigurationError(
                f"{path} is no exported buffer; give a file of leeway replay export"
            )
        file.seek(0)
        reader = ArchiveReader(file, str(path))
        chosen = Chosen(f"{path.name}, exported from {reader.header.run}")
        for group in reader.groups():
            if not chosen.take(decode(group.payload), None, choice):
                break
    return chosen


def read_evaluation(folder: Path, choice: Choice) -> Chosen:
    """Of an evaluation; where a question was played twice its last play counts."""
    settings = read_settings(folder)
    chosen = Chosen(f"evaluation {folder.name}", model=Path(settings.model))
    for entry in read_last(folder / EPISODES_FILE):
        question = msgspec.structs.replace(entry.question, data_source=entry.benchmark)
        group = entry.trajectories()
        if group is None:
            has_room = chosen.take_error(question, entry.error, choice)
        else:
            scores = [sample.scores for sample in entry.samples]
            has_room = chosen.take(group, question, choice, scores)
        if not has_room:
            break
    return chosen


def _read_run(run: RunDirectory, choice: Choice) -> Chosen:
    from leeway.services import replay_commands

    config = run.read_config()
    chosen = Chosen(f"replay buffer of {run.root.name}", model=model_dir(config.model), run=run)
    questions = _questions_of(config)

    async def read(buffer: OpenBuffer) -> None:
        async for group in _groups(buffer, chosen, choice):
            if not chosen.take(group, questions.get(group.question_id), choice):
                break

    with replay_commands._opened(str(run.root), None, None, None, ()) as target:
        target.run(read)
    return chosen


async def _groups(buffer: OpenBuffer, chosen: Chosen, choice: Choice) -> AsyncIterator[Group]:
    """Stored groups by arrival; one that is trained or dropped meanwhile is left out."""
    for placed in await buffer.records():
        if not choice.has_group(placed.group_id):
            chosen.num_groups += 1  # looked at, and not even fetched
            continue
        payload = await buffer.payload(placed)
        if payload is not None:
            yield decode(payload)


def _questions_of(config: RunConfig) -> dict[str, Question]:
    """Questions by id; none where their files are gone, since the prompts hold their text."""
    from leeway.actors.search.questions import load_sources

    try:
        sources = load_sources(config.data)
    except LeewayError:
        return {}
    return {question.id: question for source in sources for question in source.questions}
