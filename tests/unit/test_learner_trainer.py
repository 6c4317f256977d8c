"""The optimizer step: one gradient for every split, the order of its parts, its refusals."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner import passes
from leeway.learner.batch import MicroBatch, PackedBatch, build_batch, collate
from leeway.learner.config import LearnerConfig
from leeway.learner.errors import NonFiniteError
from leeway.learner.objective.loss import batch_terms, loss
from leeway.learner.objective.presets import PRESETS
from leeway.learner.passes import Passes
from leeway.learner.trainer import Trainer
from leeway.learner.update import build_update
from leeway.learner.world import World
from leeway.replay.errors import DataError, WaitTimeout
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

V = 64

torch.set_num_threads(1)  # a second thread only waits on a model this small


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def random_trajectory(rng: np.random.Generator, name: str) -> Trajectory:
    turns, position = [], int(rng.integers(2, 6))
    for _ in range(int(rng.integers(1, 4))):
        generated, observed = int(rng.integers(1, 4)), int(rng.integers(0, 4))
        turns.append(Turn(position, generated, observed, "search"))
        position += generated + observed
    num_trained = sum(turn.num_generated for turn in turns)
    return Trajectory(
        trajectory_id=name,
        token_ids=rng.integers(0, V, position).astype(np.int32),
        turns=tuple(turns),
        # Around log(1/64): a spread of 0.5 puts a good share of turns outside 1 +- 0.2.
        logprobs=(-np.log(V) + 0.5 * rng.standard_normal(num_trained)).astype(np.float32),
        versions=np.zeros(num_trained, np.int32),
        reward=float(rng.integers(0, 2)),
        stop_reason="answer",
        scores={"exact_match": 0.5},
        duration_s=1.0,
    )


def random_batch(config: LearnerConfig, num_groups: int = 3) -> PackedBatch:
    rng = np.random.default_rng(3)
    groups = [
        Group(
            group_id=GroupId(f"g{g}"),
            question_id="q",
            worker_id="w",
            trajectories=tuple(random_trajectory(rng, f"g{g}/{i}") for i in range(4)),
        )
        for g in range(num_groups)
    ]
    return build_batch(groups)


def configure(objective: str = "so-grpo", tokens: int = 4096, **more: float | str) -> LearnerConfig:
    # Below the 256 that a configuration allows, so that a tiny batch makes many micro-batches.
    return LearnerConfig(objective=objective, warmup_steps=0).model_copy(
        update={"micro_batch_tokens": tokens, **more}
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def watch(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradient of every step it will make."""
    seen: list[torch.Tensor] = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([whole(p.grad).flatten() for p in parameters]))
    )
    return seen


def observed_step(
    config: LearnerConfig, world: World | None = None, batch: PackedBatch | None = None
) -> dict[str, torch.Tensor]:
    """Applied gradients (the critic's too), loss and ||C|| of one step in float64."""
    trainer = Trainer(tiny().double(), config, world)
    seen = watch(trainer.optimizer)
    of_critic = [] if trainer.critic is None else watch(trainer.critic.optimizer)
    metrics = trainer.train_step(random_batch(config) if batch is None else batch, version=0)
    ctn_norm = 0.0 if metrics.ctn_norm is None else metrics.ctn_norm
    numbers = [metrics.loss, ctn_norm, metrics.grad_norm, metrics.policy.kl_behaviour]
    if metrics.critic is not None:
        numbers += [metrics.critic.value_loss, metrics.critic.value_mean]
    return {
        "gradient": torch.cat(seen + of_critic),
        "numbers": torch.tensor(numbers, dtype=torch.float64),
    }


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_micro_batches_do_not_change_gradient_loss_or_ctn_norm(
    name: str, num_minibatches: int
) -> None:
    more = {"ctn_raw": True} if PRESETS[name].ctn == "gradient" else {}
    whole, split = (
        observed_step(configure(name, tokens, num_minibatches=num_minibatches, **more))
        for tokens in (4096, 12)
    )
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-9)


def test_the_random_batch_has_clipped_tokens_so_that_the_ctn_tests_mean_something() -> None:
    config = configure()
    metrics = Trainer(tiny(), config).train_step(random_batch(config), 0)
    assert 0 < metrics.policy.clip_fraction_tokens < 1
    assert metrics.ctn_norm > 0


def scenario(name: str, world: World | None = None) -> dict[str, torch.Tensor]:
    """PRESET, PRESET/minibatches for two of them, or PRESET/lone for a batch of one trajectory."""
    objective, _, variant = name.partition("/")
    config = configure(objective, 12, num_minibatches=2 if variant == "minibatches" else 1)
    batch = random_batch(config)
    if variant == "lone":
        first = batch.groups[0]
        lone = first.trajectories[3]
        # The first turn's ratio is large, and clipped where the advantage is positive.
        lowered = lone.logprobs - (np.arange(len(lone.logprobs)) < lone.turns[0].num_generated)
        won = msgspec.structs.replace(lone, reward=1.0, logprobs=lowered.astype(np.float32))
        batch = build_batch([msgspec.structs.replace(first, trajectories=(won,))])
    return observed_step(config, world, batch)


SCENARIOS = (
    *sorted(PRESETS),
    "so-grpo/minibatches", "so-ppo/minibatches", "decoupled-grpo/minibatches",
    "so-grpo/lone", "ppo/lone", "so-ppo/lone",
)  # fmt: skip


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    """Of each rank, what it saw in every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    peers = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, __file__, str(folder / f"{rank}.pt")]
        peers.append(subprocess.Popen(command, env=environment))
    assert [peer.wait(timeout=240) for peer in peers] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(name: str, of_two_ranks: list[dict[str, dict]]) -> None:
    one = scenario(name)
    for of_rank in of_two_ranks:
        torch.testing.assert_close(of_rank[name], one, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", sorted(n for n in PRESETS if PRESETS[n].ctn == "gradient"))
def test_the_clipping_bias_that_ranks_agree_on_is_not_nothing(name: str) -> None:
    _, ctn_norm, *_ = scenario(name)["numbers"].tolist()
    assert ctn_norm > 0


def test_the_lone_trajectory_is_partly_clipped_so_that_one_rank_has_no_part_in_ctn() -> None:
    _, ctn_norm, grad_norm, *_ = scenario("so-ppo/lone")["numbers"].tolist()
    assert ctn_norm > 0 and grad_norm > 0


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_minibatches": 2},
        {"num_minibatches": 2, "old": "proximal", "correction": "truncate"},
    ],
)
def test_ctn_norm_is_the_norm_of_the_clipped_part_of_the_gradient(
    more: dict[str, int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the minibatch with the largest; the policy moves too little between them to matter."""
    config = configure(learning_rate=1e-15, **more)
    batch, trainer = random_batch(config), Trainer(tiny().double(), config)
    lp_T, _ = trainer.measure(batch)
    proximal_T = None
    if "old" in more:
        # Half way to the sampler, so that there are both ratios and corrections.
        proximal_T = (lp_T + batch.behaviour_T) / 2 - 0.2
        monkeypatch.setattr(trainer, "measure", lambda batch: (proximal_T, lp_T))
    update = build_update(batch, trainer.objective, 0, config.num_minibatches, proximal_T)
    tokens, a_T, turn_of_T = update.tokens, update.tokens.a_T, batch.segments.turn_of_T
    d_T = lp_T - tokens.old_T
    w_T = torch.stack([d_T[turn_of_T == k].mean() for k in turn_of_T.tolist()]).exp()
    weight_T = tokens.weight_T.double()
    if proximal_T is not None:
        weight_T = weight_T * (proximal_T - batch.behaviour_T).exp().clamp(max=2)
    clipped_T = ((a_T > 0) & (w_T > 1.2)) | ((a_T < 0) & (w_T < 0.8))
    norms = []
    for rows in update.minibatches:
        total = torch.zeros((), dtype=torch.float64)
        for token in clipped_T.nonzero().squeeze(-1).tolist():
            b = int(batch.segments.trajectory_of_T[token])
            if b not in rows:
                continue
            ids, position = batch.trajectories[b].token_ids, int(batch.position_T[token])
            before = torch.from_numpy(ids[:position].astype(np.int64))[None]
            logits = trainer.model(input_ids=before).logits
            lp = logits[0, -1].log_softmax(-1)[int(ids[position])]
            total = total + weight_T[token] * w_T[token] * a_T[token] * lp
        if not total.requires_grad:  # nothing is clipped in this one
            continue
        gradients = torch.autograd.grad(total, trainer.parameters)
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
    assert trainer.train_step(batch, 0).ctn_norm == pytest.approx(max(norms), rel=1e-6)


def second_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """Trajectories and positions that each pass for ||C|| will read."""
    seen: list[tuple[list[int], int]] = []

    def watched(batch: PackedBatch, rows: Sequence[int], wanted_T: Any = None) -> MicroBatch:
        micro_batch = collate(batch, rows, wanted_T)
        if wanted_T is not None:
            seen.append((list(rows), micro_batch.num_tokens))
        return micro_batch

    monkeypatch.setattr(passes, "collate", watched)
    return seen


def test_a_step_that_clips_nothing_has_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    batch.behaviour_T.copy_(trainer.measure(batch)[0])
    seen = second_passes(monkeypatch)
    monkeypatch.setattr(Passes, "backward_linear", lambda *_: pytest.fail("a second pass"))
    assert trainer.train_step(batch, 0).ctn_norm == 0
    assert seen == []


def test_the_second_pass_reads_clipped_trajectories_up_to_their_last_clipped_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of twelve, one: the ratio of its first turn is e, that of its later turns 1."""
    config = configure()
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    batch.behaviour_T.copy_(trainer.measure(batch)[0])
    a_T = build_update(batch, trainer.objective, 0).tokens.a_T
    first_B = batch.offset_B1[:-1]
    b = next(
        b for b, t in enumerate(batch.trajectories) if a_T[first_B[b]] > 0 and len(t.turns) > 1
    )
    turn = batch.trajectories[b].turns[0]
    batch.behaviour_T[first_B[b] : first_B[b] + turn.num_generated] -= 1
    seen = second_passes(monkeypatch)
    assert trainer.train_step(batch, 0).ctn_norm > 0
    last = turn.start + turn.num_generated - 1
    assert last < batch.lengths()[b]
    # The tokens before the last clipped one predict it.
    assert seen == [([b], last)]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_loss_of_a_step_is_the_objective_of_the_whole_batch(name: str) -> None:
    """With a group of equal rewards, and tokens that M2PO masks."""
    config = configure(name, 12)
    batch, trainer = random_batch(config), Trainer(tiny().double(), config)
    batch.reward_B[:4] = 0.0
    lp_T, _ = trainer.measure(batch)
    update = build_update(
        batch,
        trainer.objective,
        0,
        proximal_T=lp_T if trainer.objective.old == "proximal" else None,
        value_T=None if trainer.critic is None else trainer.critic.values(batch),
    )
    terms = batch_terms(trainer.objective, lp_T, update.tokens)
    assert terms.masked_T.any() or name != "m2po"
    expected = loss(trainer.objective, lp_T, update.tokens, terms).item()
    assert trainer.train_step(batch, 0).loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_gradient_is_bounded_before_it_is_divided() -> None:
    config = configure(max_grad_norm=1e-3, ctn_c=1e-2)
    metrics = Trainer(tiny(), config).train_step(random_batch(config), 0)
    assert metrics.grad_norm > 1e-3
    assert metrics.ctn_divisor == pytest.approx(metrics.ctn_norm / 1e-2)
    assert metrics.ctn_divisor > 1
    assert metrics.grad_norm_applied == pytest.approx(1e-3 / metrics.ctn_divisor)


def test_ctn_of_the_learning_rate_leaves_the_gradient_as_bounded() -> None:
    config = configure(
        max_grad_norm=1e-3, ctn_c=1e-2, ctn_target="learning-rate", learning_rate=2e-4
    )
    trainer = Trainer(tiny(), config)
    metrics = trainer.train_step(random_batch(config), 0)
    assert metrics.grad_norm > 1e-3
    assert metrics.grad_norm_applied == pytest.approx(1e-3)
    assert metrics.ctn_divisor == pytest.approx(metrics.ctn_norm / 1e-2) and metrics.ctn_divisor > 1
    assert metrics.learning_rate == pytest.approx(2e-4 / metrics.ctn_divisor)
    assert trainer.optimizer.param_groups[0]["lr"] == metrics.learning_rate


def test_a_batch_clipped_throughout_has_no_gradient_but_a_clipping_bias() -> None:
    config = configure()
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    a_T = build_update(batch, trainer.objective, 0).tokens.a_T
    # Turn ratios are e where A > 0 and 1/e where A < 0.
    batch.behaviour_T.copy_(trainer.measure(batch)[0] - a_T.sign())
    metrics = trainer.train_step(batch, 0)
    assert metrics.policy.clip_fraction_tokens == (a_T != 0).double().mean().item()
    assert metrics.grad_norm == metrics.grad_norm_applied == 0
    assert metrics.ctn_norm > 0


def test_two_minibatches_are_two_optimizer_steps() -> None:
    config = configure(num_minibatches=2)
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    seen = watch(trainer.optimizer)
    metrics = trainer.train_step(batch, 0)
    assert (len(seen), metrics.num_optimizer_steps, metrics.version) == (2, 2, 1)
    norms = [gradient.norm().item() for gradient in seen]
    assert metrics.grad_norm_applied == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert not torch.equal(*seen)


def test_a_proximal_policy_has_ratio_one_and_the_correction_by_hand() -> None:
    config = configure("decoupled-grpo")
    batch, trainer = random_batch(config), Trainer(tiny().double(), config)
    weights = (trainer.measure(batch)[0] - batch.behaviour_T).exp().tolist()
    policy = trainer.train_step(batch, 0).policy
    assert policy.clip_fraction_tokens == 0
    assert policy.kl_old == pytest.approx(0, abs=1e-12)
    assert policy.kl_behaviour > 1e-3
    truncated = [min(w, 2.0) for w in weights]
    assert policy.correction_mean == pytest.approx(sum(truncated) / len(weights))
    assert 0 < sum(w > 2 for w in weights) < len(weights)
    assert policy.correction_share == sum(w > 2 for w in weights) / len(weights)


def test_a_second_minibatch_is_clipped_against_the_start_of_the_step() -> None:
    config = configure("decoupled-grpo", num_minibatches=2, learning_rate=1e-2)
    trainer = Trainer(tiny().double(), config)
    assert trainer.train_step(random_batch(config), 0).policy.kl_old > 1e-3


def test_the_way_from_the_start_of_the_step_is_told_where_ratios_are_taken_against_it() -> None:
    """The first minibatch stands at the start; the second has moved."""
    config = configure("decoupled-grpo", num_minibatches=2, learning_rate=1e-2)
    batch, trainer = random_batch(config), Trainer(tiny().double(), config)
    start_T, _ = trainer.measure(batch)
    later_T = torch.zeros_like(start_T)
    backward = trainer._passes.backward

    def noted(*arguments: Any) -> Any:
        done = backward(*arguments)
        later_T.add_(done.lp_T)
        return done

    trainer._passes.backward = noted  # pyright: ignore[reportAttributeAccessIssue]
    policy = trainer.train_step(batch, 0).policy
    moved = (later_T - start_T).abs().numpy()
    assert policy.log_ratio_old_abs_mean == pytest.approx(moved.mean())
    assert policy.log_ratio_old_abs_p95 == pytest.approx(np.quantile(moved, 0.95))
    assert policy.log_ratio_old_abs_max == pytest.approx(moved.max())
    assert 0 < moved.max() != pytest.approx(policy.log_ratio_abs_max)


def test_the_way_from_the_sampler_is_told_once_where_ratios_are_taken_against_it() -> None:
    config = configure("grpo")
    told = Trainer(tiny(), config).train_step(random_batch(config), 0).as_dict()
    assert "log_ratio_abs_p95" in told and "log_ratio_old_abs_p95" not in told


def test_the_engine_gap_is_of_the_minibatch_that_the_version_itself_reads() -> None:
    """The second minibatch is read by weights that a large step has moved."""
    config = configure("grpo", learning_rate=1e-2, num_minibatches=2)
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    batch.behaviour_T.copy_(trainer.measure(batch)[0])
    policy = trainer.train_step(batch, 0).policy
    assert policy.gap_max is not None and policy.gap_max < 1e-5
    assert policy.log_ratio_abs_max > 1e-2


def test_a_token_that_the_model_does_not_know_ends_the_step_before_any_weight_changes() -> None:
    config = configure("so-grpo")
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    before = [p.detach().clone() for p in trainer.parameters]
    batch.trajectories[1].token_ids[-2] = trainer.model.config.vocab_size
    with pytest.raises(DataError, match=r"trajectory .*, turn .*: token .* none of the model's"):
        trainer.train_step(batch, 0)
    with pytest.raises(DataError, match="none of the model's"):
        trainer.measure(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_the_clipping_bias_is_measured_where_it_normalises_nothing() -> None:
    plain, measured = configure("grpo"), configure("grpo", measure_ctn=True)
    without = Trainer(tiny(), plain).train_step(random_batch(plain), 0)
    found = Trainer(tiny(), measured).train_step(random_batch(measured), 0)
    assert without.ctn_norm is None and "ctn_norm" not in without.as_dict()
    assert found.ctn_norm is not None and found.ctn_norm > 0
    assert (found.ctn_divisor, found.grad_norm_applied) == (1, without.grad_norm_applied)


def test_what_m2po_masks_is_told() -> None:
    config = configure("m2po")
    policy = Trainer(tiny(), config).train_step(random_batch(config), 0).policy
    assert policy.masked_fraction is not None and 0 < policy.masked_fraction < 1


def test_a_network_that_yields_nan_is_refused_and_keeps_its_weights() -> None:
    config = configure()
    trainer = Trainer(tiny(), config)
    with torch.no_grad():
        trainer.parameters[0][5] = torch.nan
    before = [p.clone() for p in trainer.parameters]
    with pytest.raises(NonFiniteError, match=r"trajectory g0/\d, turn \d: log-prob .* is nan"):
        trainer.train_step(random_batch(config), 0)
    torch.testing.assert_close(trainer.parameters, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("none", [5e-5, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4]),
        # Four steps behind the warm-up: 1, 3/4, 1/2, 1/4.
        ("linear", [5e-5, 1e-4, 1e-4, 7.5e-5, 5e-5, 2.5e-5]),
        # Half of 1 + cos(0), cos(pi/4), cos(pi/2), cos(3 pi/4).
        ("cosine", [5e-5, 1e-4, 1e-4, 8.5355e-5, 5e-5, 1.4645e-5]),
    ],
)
def test_the_rate_falls_from_the_warm_up_to_nothing_behind_the_last_step(
    decay: Literal["none", "linear", "cosine"], expected: list[float]
) -> None:
    config = LearnerConfig(
        learning_rate=1e-4, warmup_steps=2, num_steps=6, learning_rate_decay=decay
    )
    trainer = Trainer(tiny(), config)
    assert [trainer.learning_rate(v) for v in range(6)] == pytest.approx(expected, rel=1e-4)
    if decay != "none":
        assert trainer.learning_rate(6) == pytest.approx(0.0, abs=1e-12)


def test_a_run_that_goes_on_with_more_steps_has_the_rate_of_the_longer_one() -> None:
    longer = LearnerConfig(
        learning_rate=1e-4, warmup_steps=0, num_steps=8, learning_rate_decay="linear"
    )
    assert Trainer(tiny(), longer).learning_rate(4) == pytest.approx(5e-5)


def test_warm_up_rises_linearly() -> None:
    trainer = Trainer(tiny(), LearnerConfig(learning_rate=1e-4, warmup_steps=2))
    assert [trainer.learning_rate(v) for v in range(3)] == [5e-5, 1e-4, 1e-4]


def test_on_policy_data_has_ratio_one_and_no_clip() -> None:
    config = configure("grpo")
    batch, trainer = random_batch(config), Trainer(tiny(), config)
    lp_T, _ = trainer.measure(batch)
    batch.behaviour_T.copy_(lp_T)
    policy = trainer.train_step(batch, 0).policy
    assert policy.clip_fraction_tokens == 0
    assert policy.kl_behaviour == pytest.approx(0, abs=1e-6)
    assert policy.effective_sample_size == pytest.approx(1, abs=1e-6)
    assert policy.gap_max is not None and policy.gap_max < 1e-5


def test_a_batch_of_equal_rewards_trains_nothing_but_is_measured() -> None:
    config = configure("grpo")
    batch = random_batch(config)
    batch.reward_B.fill_(0.1)
    metrics = Trainer(tiny(), config).train_step(batch, 0)
    assert metrics.grad_norm == 0
    assert metrics.policy.entropy == pytest.approx(np.log(V), rel=0.01)


def test_flat_metrics_carry_scores_and_the_staleness_histogram() -> None:
    config = configure()
    flat = Trainer(tiny(), config).train_step(random_batch(config), 2).as_dict()
    assert flat["score/exact_match"] == 0.5
    assert flat["staleness_histogram/2"] == 12
    assert flat["version"] == 3
    assert all(isinstance(value, (int, float)) for value in flat.values())


@pytest.mark.parametrize("name", ["reinforce", "rloo", "so-grpo"])
def test_the_rewarded_action_becomes_more_probable(name: str) -> None:
    def episode(action: int) -> Trajectory:
        return Trajectory(
            trajectory_id=str(action),
            token_ids=np.array([1, 2, action], np.int32),
            turns=(Turn(2, 1, 0, "answer"),),
            logprobs=np.array([-np.log(V)], np.float32),
            versions=np.zeros(1, np.int32),
            reward=float(action == 7),
            stop_reason="answer",
            scores={},
            duration_s=1.0,
        )

    group = Group(
        group_id=GroupId("g"),
        question_id="q",
        worker_id="w",
        trajectories=tuple(episode(action) for action in (7, 8, 9, 7)),
    )
    config = configure(name, learning_rate=1e-2)
    batch, trainer = build_batch([group]), Trainer(tiny(), config)
    before = trainer.measure(batch)[0].exp()
    for version in range(3):
        trainer.train_step(batch, version)
    after = trainer.measure(batch)[0].exp()
    assert (after > before).tolist() == [True, False, False, True]


def check_messages(world: World) -> None:
    """What rank 0 sends arrives, empty too; a peer that has left is named within the deadline."""
    first = world.rank == 0
    assert world.broadcast_bytes(b"abc" if first else None) == b"abc"
    assert world.broadcast_bytes(b"" if first else None) == b""
    assert world.broadcast_object({"step": 3} if first else None, dict[str, int]) == {"step": 3}
    if first:
        with pytest.raises(WaitTimeout, match=r"rank 0 of 2 waited .* another rank is late"):
            world.barrier()


if __name__ == "__main__":
    joined = World.from_environment(timeout_s=60, device="cpu")
    torch.save({name: scenario(name, joined) for name in SCENARIOS}, sys.argv[1])
    check_messages(joined)
    joined.close()
    # All is said and written: a thread of torch's may abort a process that tidies up (SIGABRT).
    os._exit(0)
