"""What a configuration must not say: settings that span parts.

`problems` are refused, `remarks` are only said. Each is one sentence with
the numbers and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from leeway.learner.objective.presets import problems as problems_of_objective
from leeway.learner.objective.presets import resolve
from leeway.replay.errors import ConfigurationError
from leeway.replay.model_files import danger_in
from leeway.replay.redis_urls import parse_url
from leeway.services.config_secrets import secret_problems
from leeway.services.config_text import (
    BUNDLED,
    PATH_KEYS,
    QUESTION_FILE,
    show,
    value_at,
)
from leeway.services.redaction import redacted

if TYPE_CHECKING:
    from leeway.services.config import RunConfig


def check(config: RunConfig, source: str = "the configuration", *, has_files: bool = True) -> None:
    """Raise ConfigurationError for the first setting that would deadlock or do nothing, and with
    `has_files` for a path that leads nowhere on this machine."""
    for problem in problems(config, has_files=has_files):
        raise ConfigurationError(f"{source}: {problem}")


def problems(config: RunConfig, *, has_files: bool = True) -> Iterator[str]:
    """Every refusal, one sentence each, with the numbers and the remedy."""
    yield from _window_problems(config)
    yield from _exact_problems(config)
    yield from _length_problems(config)
    yield from _objective_problems(config)
    yield from _deadline_problems(config)
    yield from _eval_problems(config)
    yield from _source_problems(config)
    yield from secret_problems(config)
    if has_files:
        yield from _file_problems(config)


def _window_problems(config: RunConfig) -> Iterator[str]:
    replay, rollout = config.replay, config.rollout
    in_flight = rollout.max_groups_in_flight * rollout.num_workers
    if replay.max_staleness == 0 and in_flight > replay.groups_per_step:
        each = replay.groups_per_step // rollout.num_workers
        fit = (
            f"set rollout.max_groups_in_flight to at most {each}"
            if each
            else f"set rollout.num_workers to at most {replay.groups_per_step}"
        )
        yield (
            f"rollout.max_groups_in_flight = {rollout.max_groups_in_flight} with "
            f"rollout.num_workers = {rollout.num_workers} would keep {in_flight} groups in flight, "
            f"more than one step, but replay.max_staleness = 0 admits only the "
            f"replay.groups_per_step = {replay.groups_per_step} groups of the current step; "
            f"{fit}, or raise replay.max_staleness"
        )


def _exact_problems(config: RunConfig) -> Iterator[str]:
    """With max_staleness 4 the groups trained at versions 0 to 3 are 0 to 3 versions old."""
    replay, num_steps = config.replay, config.learner.num_steps
    if replay.staleness_policy == "exact" and num_steps <= replay.max_staleness:
        yield (
            f"learner.num_steps = {num_steps} ends within the ramp of replay.staleness_policy = "
            f'"exact": the first replay.max_staleness = {replay.max_staleness} steps train younger '
            f"tokens; set learner.num_steps above {replay.max_staleness}"
        )


def _length_problems(config: RunConfig) -> Iterator[str]:
    search, limit = config.search, config.policy.max_model_len
    limit_key = "policy.max_model_len"
    if search.max_trajectory_tokens is not None:
        if search.max_trajectory_tokens > limit:
            yield (
                f"search.max_trajectory_tokens = {search.max_trajectory_tokens} does nothing above "
                f"policy.max_model_len = {limit}; lower it, or raise policy.max_model_len"
            )
        limit, limit_key = search.max_trajectory_tokens, "search.max_trajectory_tokens"
    turn, seen = search.max_turn_tokens, search.max_observation_tokens
    if turn >= limit:
        yield (
            f"search.max_turn_tokens = {turn} leaves no room for a prompt within "
            f"{limit_key} = {limit}; lower it or raise {limit_key}"
        )
    elif search.max_turns > 1 and 2 * turn + seen >= limit:
        yield (
            f"one search and an answer need 2 x search.max_turn_tokens + "
            f"search.max_observation_tokens = {2 * turn + seen} tokens and the prompt, "
            f"more than {limit_key} = {limit}; raise {limit_key} or lower the two"
        )
    if config.learner.micro_batch_tokens < limit:
        yield (
            f"learner.micro_batch_tokens = {config.learner.micro_batch_tokens} cannot hold one "
            f"trajectory of {limit_key} = {limit} tokens; raise it to at least {limit}"
        )


def _objective_problems(config: RunConfig) -> Iterator[str]:
    found = list(problems_of_objective(config.learner))
    if found:
        yield from found
        return
    name, objective = show(config.learner.objective), resolve(config.learner)
    siblings, groups = config.rollout.group_size, config.replay.groups_per_step
    if siblings == 1 and objective.compares_siblings:
        yield (
            f"rollout.group_size = 1 gives every trajectory zero advantage under "
            f"learner.objective = {name}, which compares siblings; "
            f"set rollout.group_size to at least 2"
        )
    if objective.advantage == "batch" and siblings * groups == 1:
        yield (
            f"a batch of one trajectory has zero advantage under learner.objective = {name}; "
            "raise replay.groups_per_step or rollout.group_size to at least 2"
        )
    if config.learner.num_minibatches > siblings * groups:
        yield (
            f"learner.num_minibatches = {config.learner.num_minibatches} is more than the "
            f"{siblings * groups} trajectories of a step (rollout.group_size x "
            "replay.groups_per_step); lower it"
        )


def _deadline_problems(config: RunConfig) -> Iterator[str]:
    """Pairs where the second must outlast the first, and what happens otherwise."""
    pairs = (
        (
            "search.retriever_timeout_s",
            "rollout.episode_timeout_s",
            "a slow retrieval would end every group",
        ),
        (
            "rollout.episode_timeout_s",
            "replay.slot_timeout_s",
            "a slot would be given away while its group is still played",
        ),
        (
            "replay.slot_timeout_s",
            "learner.draw_timeout_s",
            "the learner would give up before the slots of a dead worker come back",
        ),
        (
            "learner.publish_timeout_s",
            "replay.lease_timeout_s",
            "a batch would go back to the buffer while its version is still published",
        ),
    )
    for shorter, longer, otherwise in pairs:
        first, second = value_at(config, shorter), value_at(config, longer)
        if second <= first:
            yield (
                f"{longer} = {second:g} does not outlast {shorter} = {first:g}, so {otherwise}; "
                f"set {longer} above {first:g}"
            )


def _eval_problems(config: RunConfig) -> Iterator[str]:
    if config.eval.every_steps and not config.eval.num_questions:
        yield (
            f"eval.every_steps = {config.eval.every_steps} does nothing while "
            "eval.num_questions = 0; set eval.num_questions to at least 1 or eval.every_steps to 0"
        )


def _source_problems(config: RunConfig) -> Iterator[str]:
    url = config.replay.url
    if url is not None:
        try:
            parse_url(url)
        except ConfigurationError as error:
            yield f"{error} (it is {show(redacted(url))})"
    retriever = config.search.retriever_url
    if retriever is not None and not re.match(r"https?://.", retriever):
        yield f"search.retriever_url = {show(retriever)} must start with http:// or https://"
    yield from _retriever_problems(config)


def _file_problems(config: RunConfig) -> Iterator[str]:
    yield from _index_problems(config)
    for key, what in PATH_KEYS.items():
        yield from _path_problems(config, key, value_at(config, key), what)
    yield from _question_file_problems(config)


def _question_file_problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.train != BUNDLED and data.train == data.held_out:
        yield (
            f"data.held_out is the same file as data.train ({data.train}); "
            "held-out questions must be others"
        )
    paths = [source.path for source in data.sources]
    for i, path in enumerate(paths):
        yield from _path_problems(config, f"data.sources[{i}].path", path, QUESTION_FILE)
        if path != BUNDLED and path == data.held_out:
            yield (
                f"data.held_out is the same file as data.sources[{i}] ({path}); "
                "held-out questions must be others"
            )
        if path in paths[:i]:
            yield (
                f"data.sources[{i}] is the same file as data.sources[{paths.index(path)}] "
                f"({path}); name it once, with a larger weight"
            )


def _retriever_problems(config: RunConfig) -> Iterator[str]:
    """One place passages come from; nothing is named that would not be read."""
    search = config.search
    if search.corpus != BUNDLED:
        for key in ("retriever_url", "index"):
            if getattr(search, key) is not None:
                yield f"search.corpus is not read while search.{key} is set; remove one of the two"
    if search.index is not None and search.retriever_url is not None:
        yield "search.index is not read while search.retriever_url is set; remove one of the two"
    if search.encoder is not None and search.index is None:
        yield "search.encoder is not read without a dense search.index; remove it or name the index"


def _index_problems(config: RunConfig) -> Iterator[str]:
    search = config.search
    wanted = {
        "index": ("manifest.json", "an index; leeway retriever index CORPUS --out DIR builds one"),
        "encoder": ("config.json", "a Hugging Face model folder that holds config.json"),
    }
    for key, (file, what) in wanted.items():
        folder = getattr(search, key)
        if folder is not None and not (Path(folder) / file).is_file():
            yield f"search.{key} = {show(folder)} is not {what}"


def _path_problems(config: RunConfig, key: str, value: str, what: str) -> Iterator[str]:
    if value == BUNDLED:
        return
    path, wants_folder = Path(value), key == "model"
    remedy = f'give {what}, or "{BUNDLED}"'
    if not path.exists():
        looked = "" if path.is_absolute() else " beside the file or in the working directory"
        yield f"{key} = {show(value)} does not exist{looked}; {remedy}"
    elif path.is_dir() != wants_folder:
        yield f"{key} = {show(value)} is a {'file' if wants_folder else 'folder'}; {remedy}"
    elif wants_folder:
        yield from _model_problems(key, path, remedy, config.policy.trust_remote_code)


def _model_problems(key: str, folder: Path, remedy: str, trusts_code: bool) -> Iterator[str]:
    danger = danger_in(folder, trusts_code=trusts_code)
    if danger is not None:
        yield f'{key} = "{folder}" {danger}'
        return
    wanted = {
        "config.json": ("config.json",),
        "weights (*.safetensors)": ("*.safetensors",),
        "tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer_config.json"),
    }
    for what, patterns in wanted.items():
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            yield f'{key} = "{folder}" holds no {what}; {remedy}'
            return


def remarks(config: RunConfig) -> list[str]:
    """What is allowed but is probably not meant: printed, never refused."""
    return list(_remarks(config))


def _remarks(config: RunConfig) -> Iterator[str]:
    replay, rollout, learner = config.replay, config.rollout, config.learner
    if config.engine.dtype != learner.precision:
        yield (
            f'policy.dtype = "{config.policy.dtype}" and learner.precision = '
            f'"{learner.precision}" round weights differently: updates smaller than bfloat16 can '
            "tell reach one of the two alone, and ratios drift from 1 with nothing stale; leave "
            'policy.dtype at "auto"'
        )
    window = replay.groups_per_step * (replay.max_staleness + 1)
    in_flight = rollout.max_groups_in_flight * rollout.num_workers
    if replay.max_groups < window:
        reachable = (replay.max_groups - 1) // replay.groups_per_step
        yield (
            f"the version window would admit replay.groups_per_step x (replay.max_staleness + 1) = "
            f"{window} groups, replay.max_groups = {replay.max_groups} stops at fewer: even a full "
            f"buffer reaches staleness {reachable}, only stragglers reach {replay.max_staleness}"
        )
    if in_flight > min(window, replay.max_groups):
        yield (
            f"rollouts ask for {in_flight} groups at once (rollout.max_groups_in_flight x "
            f"rollout.num_workers), at most {min(window, replay.max_groups)} are ever admitted"
        )
    if replay.is_adaptive and 0 < replay.max_staleness * replay.groups_per_step <= in_flight:
        at_once = min(in_flight, replay.reach)
        steps = at_once / replay.groups_per_step
        yield (
            f"rollouts play {at_once} groups at once, {steps:.3g} steps' worth, so a group may "
            f"take as many steps, and replay.max_staleness = {replay.max_staleness} leaves slower "
            "ones no time: the learner would wait for each; where it is the slower side, a higher "
            "one makes other groups no older (leeway bench lookahead)"
        )
    if config.eval.every_steps >= learner.num_steps:
        yield (
            f"eval.every_steps = {config.eval.every_steps} never comes within "
            f"learner.num_steps = {learner.num_steps}"
        )
    if (learner.critic_warmup_steps or 0) >= learner.num_steps:
        yield (
            f"learner.critic_warmup_steps = {learner.critic_warmup_steps} covers all of "
            f"learner.num_steps = {learner.num_steps}: the policy never changes"
        )
    if resolve(learner).old == "proximal" and learner.num_minibatches == 1:
        yield (
            f"learner.objective = {show(learner.objective)} takes ratios against the policy at the "
            "start of the step, and learner.num_minibatches = 1 makes one optimizer step of it: "
            "every ratio is 1 and nothing is clipped; what is left is learner.correction"
        )
    if learner.warmup_steps >= learner.num_steps:
        yield (
            f"learner.warmup_steps = {learner.warmup_steps} covers all of "
            f"learner.num_steps = {learner.num_steps}: the full learning rate is never used"
        )
    yield from _exact_remarks(config)


def _exact_remarks(config: RunConfig) -> Iterator[str]:
    """A window of 80 groups, 16 in flight: 5 rounds of episodes before the first step."""
    replay, rollout = config.replay, config.rollout
    in_flight = rollout.max_groups_in_flight * rollout.num_workers
    rounds, wait_s = -(-replay.window // in_flight), config.learner.draw_timeout_s
    if replay.staleness_policy == "exact" and rounds * rollout.episode_timeout_s > wait_s:
        yield (
            f'replay.staleness_policy = "exact" waits for all {replay.window} groups of the window '
            f"before the first step, {rounds} times the {in_flight} in flight; "
            f"learner.draw_timeout_s = {wait_s:g} leaves {wait_s / rounds:.0f} s for each time"
        )
