"""`leeway warmstart`: make the bundled policy and judge it.

    episodes (worker processes) -> batches (a thread) -> train -> save -> evaluate

Needs no network. One process per core makes episodes; the same seed and number of workers give the
same batches.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from leeway.actors.bundle.facts import (
    BundledIndex,
    BundledQuestion,
    load_passages,
    load_questions,
)
from leeway.actors.config import SearchConfig, bundled_dir
from leeway.actors.search.protocol import CORRECTION, STOP, last_answer, parse, render_observation
from leeway.actors.search.rewards import exact_match
from leeway.actors.search.script import (
    CAREFUL,
    CARELESS,
    END,
    PAD,
    CareMix,
    Episode,
    episodes,
    the_stage,
)
from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.services import dry_run
from leeway.services.warmstart_command import Options

CHUNK: Final = 1024
"""Episodes a worker hands over at once."""
CHUNK_S: Final = 300.0
"""Seconds that a worker may take to make so many; it takes one."""
MAX_TOKENS: Final = 1024
"""Longest trajectory of the evaluation, as policy.max_model_len has it by default."""
NUM_SAMPLES: Final = 8
SCORES: Final = "warmstart_scores.json"
"""In the judged folder."""


def care_mix(name: str, changes: str) -> CareMix:
    """("careless", "early_stop=0.7") -> CARELESS with that early_stop; unknown keys are refused."""
    mix = CARELESS if name == "careless" else CAREFUL
    known = ", ".join(CareMix.__struct_fields__)
    try:
        pairs = [pair.split("=") for pair in changes.split(",") if pair]
        given = {key.strip(): float(value) for key, value in pairs}
        return msgspec.structs.replace(mix, **given)
    except (ValueError, TypeError):
        raise ConfigurationError(
            f"--care {changes} is no change of the mix; write it like early_stop=0.7, with some of "
            f"{known}"
        ) from None


def make_policy(options: Options) -> None:
    """Check, then train and judge as asked for. Raises ConfigurationError."""
    mix = care_mix(options.mix, options.care)
    check(options)
    if options.dry_run:
        return plan(options)
    # Whoever reads JSON wants nothing else on stdout.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        scores = work(options, mix)
    if options.json:
        done = {"folder": str(options.out), "num_steps": options.steps, "scores": scores}
        print(json.dumps(done), flush=True)
    return None


def check(options: Options) -> None:
    """Raise ConfigurationError for folders that do not fit what is asked for."""
    if not options.steps and not options.eval:
        raise ConfigurationError(
            "nothing is asked for; give --steps N to train, --eval N to judge, or both"
        )
    judged = None if options.steps else options.out
    for name, folder in (("--init", options.init), ("--out", judged)):
        if folder is not None and not (folder / "config.json").is_file():
            raise ConfigurationError(
                f"{name} {folder} is no model folder; name one in Hugging Face form, or give "
                "--steps to train one"
            )


def plan(options: Options) -> None:
    """What would be done."""
    parts = []
    if options.steps:
        parts.append(f"train {options.steps:,} steps of {options.batch:,} scripted episodes")
    if options.eval:
        parts.append(f"judge the policy on {options.eval:,} held-out questions")
    dry_run.check_writable(options.out, "--out")
    scores = options.out / SCORES
    tell = dry_run.Plan(
        does=" and ".join(parts),
        reads=[dry_run.found("bundle", bundled_dir())]
        + ([dry_run.found("policy", options.init)] if options.init else []),
        writes=([dry_run.Place(what="policy", where=str(options.out))] if options.steps else [])
        + ([dry_run.Place(what="scores", where=str(scores))] if options.eval else []),
        facts={"episodes": options.steps * options.batch},
    )
    dry_run.tell(tell, options.json)


def work(options: Options, mix: CareMix) -> dict[str, float] | None:
    """Train and judge; returns the scores, None without --eval."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out
    if options.steps:
        train_policy(options, mix, device)
    if not options.eval:
        return None
    scores = evaluate(out, options.eval, options.seed, device)
    (out / SCORES).write_text(json.dumps(scores, indent=2) + "\n")
    return scores


def train_policy(options: Options, mix: CareMix, device: str) -> None:
    """Make episodes, train, save to `options.out`."""
    from leeway.learner import warmstart as learner

    config = learner.WarmstartConfig(
        num_steps=options.steps,
        batch_size=options.batch,
        seed=options.seed,
        learning_rate=options.learning_rate,
    )
    tokenizer = bundled_tokenizer()
    pad_id, end_id = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    # The workers are forked before anything touches the device: CUDA does not survive a fork.
    num_workers = options.workers or (os.cpu_count() or 1)
    with EpisodeWorkers(options.seed, mix, options.real_share, num_workers) as workers:
        model = learner.build_model(tokenizer.get_vocab_size(), end_id, pad_id, options.seed)
        if options.init:
            learner.load_weights(model, options.init)
        print(f"{model.num_parameters():,} parameters, {device}, {mix}", flush=True)
        model.to(device)  # pyright: ignore[reportArgumentType]  (transformers wraps Module.to)
        clock = learner.Clock()

        def on_step(step: int, loss: float) -> None:
            if not math.isnan(loss):
                print(f"step {step:5d}  loss {loss:.4f}  {step / clock():.2f} steps/s", flush=True)
            if options.save_every and step % options.save_every == 0 and step < options.steps:
                folder = options.out.with_name(f"{options.out.name}-step-{step}")
                save_policy(model, folder)
                if options.eval:
                    print(f"step {step}:", flush=True)
                    evaluate(folder, options.eval, options.seed, device)

        source = learner.batches(workers.examples(), config.batch_size, pad_id, config.seed)
        learner.train(model, learner.ahead(source), config, on_step)
    save_policy(model, options.out)


def save_policy(model: Any, folder: Path) -> None:
    from leeway.learner import warmstart as learner

    learner.save(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_dir() / name, folder / name)


def bundled_tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(bundled_dir() / "tokenizer.json"))


# Episodes


class Packed(NamedTuple):
    """Many examples end to end."""

    ids: np.ndarray
    """int16, every token."""
    is_trained: np.ndarray
    """bool, as long."""
    ends: np.ndarray
    """int64, where each example ends."""

    def to_bytes(self) -> bytes:
        """For the way to another process."""
        return msgspec.msgpack.encode([array.tobytes() for array in self])

    @staticmethod
    def from_bytes(data: bytes) -> Packed:
        """Inverse of to_bytes."""
        ids, is_trained, ends = msgspec.msgpack.decode(data, type=list[bytes])
        return Packed(
            np.frombuffer(ids, np.int16),
            np.frombuffer(is_trained, np.bool_),
            np.frombuffer(ends, np.int64),
        )


def packed(chunk: list[Episode], tokenizer: Any) -> Packed:
    """Tokenise each segment alone, as a rollout tokenises prompt, turns and observations."""
    segments = [segment for episode in chunk for segment in episode.segments]
    encodings = tokenizer.encode_batch_fast([s.text for s in segments], add_special_tokens=False)
    tokens = [encoding.ids for encoding in encodings]
    lengths = np.array([len(t) for t in tokens])
    ids = np.fromiter(itertools.chain.from_iterable(tokens), np.int16, int(lengths.sum()))
    is_trained = np.repeat(np.array([s.is_trained for s in segments]), lengths)
    last_segment = np.cumsum([len(episode.segments) for episode in chunk]) - 1
    return Packed(ids, is_trained, np.cumsum(lengths)[last_segment])


def make_episodes(seed: int, mix: CareMix, real_share: float, outbox: Any) -> None:
    """Body of a worker process: fills its outbox, the end of a pipe, until it is ended."""
    tokenizer = bundled_tokenizer()
    source = episodes(seed, mix, real_share)
    while True:
        chunk = packed(list(itertools.islice(source, CHUNK)), tokenizer)
        outbox.send_bytes(chunk.to_bytes())


class EpisodeWorkers:
    """Worker processes with an outbox each, read in turn: the order does not depend on speed."""

    def __init__(self, seed: int, mix: CareMix, real_share: float, num_workers: int) -> None:
        the_stage()  # read once here; the forked workers share it
        self._arguments = [(seed * 1000 + i, mix, real_share) for i in range(num_workers)]
        self._workers: list[tuple[Any, Any]] = []  # process and inbox

    def __enter__(self) -> EpisodeWorkers:
        context = multiprocessing.get_context("fork")
        for arguments in self._arguments:
            inbox, outbox = context.Pipe(duplex=False)
            process = context.Process(target=make_episodes, args=(*arguments, outbox), daemon=True)
            process.start()
            # Only the worker may hold it: an inbox ends when nobody does.
            outbox.close()
            self._workers.append((process, inbox))
        return self

    def __exit__(self, *_: object) -> None:
        for process, _inbox in self._workers:
            process.kill()

    def examples(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids and which of them are trained. Raises LeewayError when a worker has ended, or
        makes nothing for CHUNK_S."""
        for process, inbox in itertools.cycle(self._workers):
            chunk = Packed.from_bytes(_next_chunk(process, inbox))
            start = 0
            for end in chunk.ends:
                yield chunk.ids[start:end].astype(np.int32), chunk.is_trained[start:end]
                start = end


def _next_chunk(process: Any, inbox: Any) -> bytes:
    if not inbox.poll(CHUNK_S):
        raise LeewayError(f"process {process.pid} made no episodes within {CHUNK_S:g} s")
    try:
        return inbox.recv_bytes()
    except EOFError:
        process.join(1.0)
        raise LeewayError(
            f"process {process.pid}, which makes episodes, ended with exit code {process.exitcode}"
        ) from None


# Evaluation


class Played(msgspec.Struct):
    """One episode of the evaluation, while it is played."""

    question: BundledQuestion
    ids: list[int]
    turns: list[str] = []
    num_searches: int = 0
    num_invalid: int = 0
    is_over: bool = False

    @property
    def is_right(self) -> bool:
        return exact_match(last_answer(self.turns), self.question.golden_answers) == 1.0


class Judge:
    """Plays bundled questions with a saved policy against the bundled index, many at once."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
        self.model = model.to(device).eval()
        self.tokenizer = bundled_tokenizer()
        self.index = BundledIndex(load_passages())
        self.rules = SearchConfig()
        self.pad_id = self.tokenizer.token_to_id(PAD)
        self.stop_ids = {self.tokenizer.token_to_id(token) for token in (*STOP, END)}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def play(self, questions: list[BundledQuestion], generator: Any = None) -> list[Played]:
        """Greedy without a generator."""
        prompt = self.rules.prompt_template
        games = [Played(q, self.encode(prompt.format(question=q.question))) for q in questions]
        for turn in range(self.rules.max_turns):
            on = [game for game in games if not game.is_over]
            if on:
                self.take_turn(on, generator, is_last=turn + 1 == self.rules.max_turns)
        return games

    def take_turn(self, games: list[Played], generator: Any, is_last: bool) -> None:
        from leeway.learner.warmstart import decode

        made = decode(
            self.model,
            [game.ids for game in games],
            stop_ids=self.stop_ids,
            pad_id=self.pad_id,
            max_tokens=self.rules.max_turn_tokens,
            generator=generator,
        )
        searching: list[tuple[Played, str]] = []
        for game, ids in zip(games, made, strict=True):
            game.ids += ids
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            game.turns.append(text)
            parsed = parse(text)
            game.num_searches += parsed.action == "search"
            game.num_invalid += parsed.action == "invalid"
            game.is_over = is_last or parsed.action == "answer"
            if parsed.action == "search":
                searching.append((game, parsed.content))
            elif parsed.action == "invalid":
                game.ids += self.encode(CORRECTION)
        found = self.index.search([query for _, query in searching])
        for (game, _), passages in zip(searching, found, strict=True):
            game.ids += self.encode(render_observation([(p.title, p.text) for p in passages]))
        for game in games:
            game.is_over |= len(game.ids) + self.rules.max_turn_tokens > MAX_TOKENS


def evaluate(folder: Path, num_questions: int, seed: int, device: str) -> dict[str, float]:
    """Print and return exact match, greedy and sampled, over held-out questions."""
    import torch

    judge = Judge(folder, device)
    questions = load_questions("held_out")
    random.Random(seed).shuffle(questions)
    questions = questions[:num_questions]
    greedy = in_parts(judge, questions, None)
    generator = torch.Generator(device).manual_seed(seed)
    sampled = in_parts(judge, [q for q in questions for _ in range(NUM_SAMPLES)], generator)
    scores = {**summary("greedy", greedy), **summary("sampled", sampled)}
    groups = [sampled[i : i + NUM_SAMPLES] for i in range(0, len(sampled), NUM_SAMPLES)]
    for name, hops in (("", (1, 2)), ("_1hop", (1,)), ("_2hop", (2,))):
        some = [g for g in groups if g[0].question.metadata.hops in hops]
        scores[f"pass@{NUM_SAMPLES}{name}"] = mean([any(p.is_right for p in g) for g in some])
    print("  ".join(f"{name} {value:.3f}" for name, value in scores.items()), flush=True)
    return scores


def in_parts(judge: Judge, questions: list[BundledQuestion], generator: Any) -> list[Played]:
    size = 256
    parts = (questions[i : i + size] for i in range(0, len(questions), size))
    return [game for part in parts for game in judge.play(part, generator)]


def summary(name: str, games: list[Played]) -> dict[str, float]:
    one = [g.is_right for g in games if g.question.metadata.hops == 1]
    two = [g.is_right for g in games if g.question.metadata.hops == 2]
    return {
        f"{name}_exact_match": mean([g.is_right for g in games]),
        f"{name}_1hop": mean(one),
        f"{name}_2hop": mean(two),
        f"{name}_searches": mean([g.num_searches for g in games]),
        f"{name}_invalid": mean([g.num_invalid > 0 for g in games]),
    }


def mean(values: list[bool] | list[int]) -> float:
    return sum(values) / max(1, len(values))
