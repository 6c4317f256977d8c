"""Configuration of rollouts: the policy that plays, the search environment, the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from leeway.replay.config import FrozenModel


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
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Arithmetic of the engine. `auto` is bfloat16 on GPUs and float32 on CPUs."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one CPU engine."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """Seconds an engine may take to load before the run is given up."""


class SearchConfig(FrozenModel):
    """The search environment. Keys of the `[search]` table."""

    corpus: str = "bundled"
    """JSON-lines file of {"id", "contents"}, plain, .xz or .zst; or `bundled`."""
    retriever_url: str | None = None
    """URL of a Search-R1 style retriever, without /retrieve. None serves `corpus` by BM25."""
    top_k: int = Field(default=2, ge=1)
    """Passages returned for a query."""
    max_turns: int = Field(default=4, ge=1)
    """Most completions in an episode."""
    max_turn_tokens: int = Field(default=64, ge=1)
    """Most tokens the policy may sample in one turn."""
    max_observation_tokens: int = Field(default=320, ge=1)
    """Tokens of one observation; longer ones are cut at the end of the passages."""
    prompt_template: str = "Question: {question}\n"
    """First tokens of every episode; must hold {question}."""
    retriever_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds a retrieval may take, retries included, before the group is dropped."""

    @model_validator(mode="after")
    def _check(self) -> SearchConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError("search.prompt_template must hold {question}")
        return self


class DataConfig(FrozenModel):
    """Questions. Keys of the `[data]` table."""

    train: str = "bundled"
    """JSON-lines file of {"id", "question", "golden_answers", "metadata"}; or `bundled`."""
    held_out: str = "bundled"
    """Questions of the same form that are never trained on; or `bundled`."""
    seed: int = 0
    """Order of the training questions."""


class RolloutConfig(FrozenModel):
    """Rollout workers. Keys of the `[rollout]` table."""

    num_workers: int = Field(default=1, ge=1)
    """Rollout workers, each a Ray Serve replica that plays many episodes at once."""
    group_size: int = Field(default=8, ge=1)
    """Sibling trajectories of one question."""
    max_groups_in_flight: int = Field(default=16, ge=1)
    """Groups one worker plays at once; the version window may allow fewer."""
    episode_timeout_s: float = Field(default=90.0, gt=0)
    """Seconds one group may take before it is dropped."""
    max_failure_share: float = Field(default=0.2, gt=0, le=1)
    """Share of the last 50 groups that may be dropped for failures before the run stops."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward once for an episode that held a malformed action."""
    retrieval_reward: float = Field(default=0.0, ge=0)
    """Added once, for the search that first brings a golden answer. Above 0 every turn carries the
    reward it earned itself; 0 rewards the whole episode."""


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
