"""Configuration of rollouts: the policy that plays, the search environment, the workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from leeway.replay.config import FrozenModel

BARE_PROMPT = "Question: {question}\n"
"""Enough for a model that was trained for the protocol."""
ANSWER_REWARDS = ("auto", "exact-match", "f1", "substring", "multiple-choice")
"""Names that `reward.answer` knows."""


def is_import_path(text: str) -> bool:
    """Whether `text` has the form package.module:function."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


class PolicyConfig(FrozenModel):
    """The engine that samples tokens. Keys of the `[policy]` table."""

    backend: Literal["vllm", "torch"] = "vllm"
    """`vllm` serves; `torch` decodes in the replica itself, Llama-shaped models only (for tests and
    experiments)."""
    num_replicas: int = Field(default=1, ge=1)
    """Engines, each a Ray Serve replica."""
    max_model_len: int = Field(default=1024, ge=16)
    """Most tokens of a trajectory, prompt and observations included."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests the engine decodes at once."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory for keys and values on a CPU engine, in GiB."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU that its engine may use. Not read on CPUs."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one engine spreads its weights over."""
    staging: Literal["auto", "always", "never"] = "auto"
    """Where a published version is received. always: beside the one in use, while tokens are
    generated, in as much memory again as the weights take. never: in place, with the engine paused
    until the last byte has come. auto: beside it where memory allows; the log says which. Of
    backend vllm; torch receives beside it."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Arithmetic of the engine. `auto` is that of the learner (`learner.precision`), so that both
    round the same weights alike: of two that do not, one hides small updates from the other, and
    the longer a run goes on the more their log-probs differ (docs/findings.md, section 13)."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one CPU engine."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """Seconds an engine may take to load before the run is given up."""
    engine_metrics: bool = False
    """Whether vLLM's own metrics are exported by Ray, beside Ray's (docs/metrics.md). They cost the
    engine some time in every step. Of backend vllm."""
    trust_remote_code: bool = False
    """Whether Python code that lies in the model folder is run, by engine and learner. A folder
    that names such code (auto_map in its config.json) is refused without it. true lets whoever made
    the folder do what you may do. Of backend vllm."""

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        if self.backend == "torch" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"policy.tensor_parallel_size = {self.tensor_parallel_size} needs policy.backend ="
                ' "vllm", since torch decodes on one device; set it to 1'
            )
        return self


class SearchConfig(FrozenModel):
    """The search environment. Keys of the `[search]` table."""

    corpus: str = "bundled"
    """Passages to search: JSON lines of {"id", "contents"}, plain, .xz or .zst, Parquet or Arrow;
    or `bundled`. They are indexed by BM25 at every start."""
    index: str | None = None
    """Folder that `leeway retriever index CORPUS --out DIR` wrote, in place of `corpus`: of any
    size, BM25 or dense."""
    encoder: str | None = None
    """Model folder of a dense `index`. None takes the folder it was built with."""
    retriever_url: str | None = None
    """URL of a Search-R1 style retriever, without /retrieve. None serves `index` or `corpus`."""
    top_k: int = Field(default=2, ge=1)
    """Passages returned for a query."""
    max_turns: int = Field(default=4, ge=1)
    """Most completions in an episode."""
    max_turn_tokens: int = Field(default=64, ge=1)
    """Most tokens the policy may sample in one turn."""
    max_observation_tokens: int = Field(default=320, ge=1)
    """Tokens of one observation; longer ones are cut at the end of the passages."""
    max_trajectory_tokens: int | None = Field(default=None, ge=16)
    """Most tokens of a trajectory: prompt, turns and observations together. None takes
    policy.max_model_len, which it may not exceed."""
    prompt: Literal["auto", "template", "instructions", "data"] = "auto"
    """Whose words begin an episode. template: prompt_template. instructions: an explanation of the
    protocol. data: the messages of the question's own row, as they are. auto: the row's messages
    where it has some; else prompt_template where it is another than the default, or where the
    model's tokenizer holds the protocol's tags as tokens, as the bundled one's does; else the
    instructions."""
    prompt_template: str = BARE_PROMPT
    """The words of `template`; must hold {question}."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Whether the first prompt is put through the model's chat template; later turns never are.
    off: plain text. auto: on for a model that ends a reply with its end-of-sequence token, which
    chat models do and base models that only carry a template do not."""
    system_prompt: str | None = None
    """System message of the first prompt, or in plain text what comes before it. None sends
    none."""
    retriever_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds a retrieval may take, retries included, before the group is dropped."""

    @model_validator(mode="after")
    def _check(self) -> SearchConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError("search.prompt_template must hold {question}")
        if self.prompt in ("data", "instructions") and self.prompt_template != BARE_PROMPT:
            raise ValueError(
                f'search.prompt_template is not read with search.prompt = "{self.prompt}";'
                " remove one of them"
            )
        return self


class SourceConfig(FrozenModel):
    """One set of training questions in a mixture. Keys of a `[[data.sources]]` table."""

    path: str
    """Questions, as for data.train; or `bundled`."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the questions drawn from this source, relative to the other weights. None, for all
    sources or for none: as many as it holds, as if the files were one."""
    name: str | None = Field(default=None, pattern=r"^[^\s:]+$")
    """Told apart by it. None takes the file's name without its suffix."""


class DataConfig(FrozenModel):
    """Questions. Keys of the `[data]` table."""

    train: str = "bundled"
    """Training questions: JSON lines (FlashRAG or MedQA) or parquet (Search-R1); or `bundled`."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sets of training questions in place of data.train, mixed by weight: one
    `[[data.sources]]` table each, with `path`, and where wanted `weight` and `name`."""
    held_out: str = "bundled"
    """Questions in one of the same forms that are never trained on; or `bundled`."""
    seed: int = 0
    """Order of the training questions."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.sources and self.train != "bundled":
            raise ValueError("data.train is not read beside data.sources; remove one of the two")
        weights = [source.weight for source in self.sources]
        if any(weight is None for weight in weights) and any(weights):
            raise ValueError(
                "data.sources gives a weight to some sources only; give one to each, or to none"
            )
        if not all(math.isfinite(weight) for weight in weights if weight is not None):
            raise ValueError("data.sources has a weight that is no finite number")
        return self


class RewardConfig(FrozenModel):
    """What an episode earns. Keys of the `[reward]` table."""

    answer: str = "auto"
    """What the last answer earns, 0 to 1: exact-match, f1, substring or multiple-choice; or a
    function of your own, as package.module:function. auto: multiple-choice for a question with
    choices, exact-match for any other."""
    format_reward: float = Field(default=0.0, ge=0)
    """Added once for an episode in which every turn is one thought and one action, the last an
    answer."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward once for an episode that held a malformed action."""
    retrieval_reward: float = Field(default=0.0, ge=0)
    """Added once, for the search that first brings a golden answer. Above 0 every turn carries the
    reward it earned itself; 0 rewards the whole episode."""

    @field_validator("answer")
    @classmethod
    def _check_answer(cls, name: str) -> str:
        if name not in ANSWER_REWARDS and not is_import_path(name):
            raise ValueError(
                f'reward.answer = "{name}" is no reward; it must be one of'
                f" {', '.join(ANSWER_REWARDS)}, or package.module:function"
            )
        return name


class EnvironmentConfig(FrozenModel):
    """The environment that episodes are played in. Keys of the `[environment]` table."""

    factory: str = "search"
    """`search`, or your own function that builds an environment, as package.module:function."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the factory as it is; any keys."""

    @model_validator(mode="after")
    def _check(self) -> EnvironmentConfig:
        if self.factory == "search" and self.options:
            raise ValueError(
                "environment.options is not read by the search environment, whose keys are in"
                " [search] and [reward]; remove it, or name your own environment.factory"
            )
        if self.factory != "search" and not is_import_path(self.factory):
            raise ValueError(
                f'environment.factory = "{self.factory}" is neither search nor of the form'
                " package.module:function"
            )
        return self


class RolloutConfig(FrozenModel):
    """Rollout workers. Keys of the `[rollout]` table."""

    num_workers: int = Field(default=1, ge=1)
    """Rollout workers, each a Ray Serve replica that plays many episodes at once."""
    group_size: int = Field(default=8, ge=1)
    """Sibling trajectories of one question."""
    max_groups_in_flight: int = Field(default=16, ge=1)
    """Groups one worker plays at once; the buffer may admit fewer."""
    episode_timeout_s: float = Field(default=90.0, gt=0)
    """Seconds one group may take before it is dropped."""
    max_failure_share: float = Field(default=0.2, gt=0, le=1)
    """Share of the last 50 groups that may be dropped for failures before the run stops."""


def bundled_dir() -> Path:
    """The folder of the bundled model, corpus and questions."""
    return Path(__file__).resolve().parent / "bundle"


def corpus_file(config: SearchConfig) -> Path:
    """The corpus that `search.corpus` names."""
    return bundled_dir() / "corpus.jsonl.xz" if config.corpus == "bundled" else Path(config.corpus)


def train_file(config: DataConfig) -> Path:
    """The questions that `data.train` names."""
    return bundled_dir() / "train.jsonl" if config.train == "bundled" else Path(config.train)


def held_out_file(config: DataConfig) -> Path:
    """The questions that `data.held_out` names."""
    if config.held_out == "bundled":
        return bundled_dir() / "held_out.jsonl"
    return Path(config.held_out)


def model_dir(model: str) -> Path:
    """The model directory that the key `model` names."""
    return bundled_dir() / "model" if model == "bundled" else Path(model)
