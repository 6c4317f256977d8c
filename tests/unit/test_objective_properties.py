"""What holds for every objective, over random turn structures: empty turns, one-token turns, and
trajectories without a trained token among them.

Letters as in learner/objective: `T` trained tokens, `K` turns, `B` trajectories, `S` a part's
tokens, `N` steps of advantage estimation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leeway.learner.objective import clip
from leeway.learner.objective.advantage import gae, segment_decayed_sum
from leeway.learner.objective.ctn import bias_coefficient
from leeway.learner.objective.kinds import Ratio, Reduce
from leeway.learner.objective.loss import BatchTerms, Tokens, batch_terms, clipped, loss
from leeway.learner.objective.presets import PRESETS, Objective
from leeway.learner.objective.ratio import Segments, importance_ratio, kl_k3, log_ratio
from leeway.learner.objective.reduce import reduce_weight

RATIOS: tuple[Ratio, ...] = (
    "none", "token", "turn", "turn-arithmetic", "sequence", "sequence-product",
)  # fmt: skip
REDUCES: tuple[Reduce, ...] = ("token", "trajectory", "turn")
EPS = (0.2, 3e-4, 4e-4, 4.0)
EDGES = [math.log(1 + e) for e in EPS] + [math.log(1 - e) for e in EPS[:3]]
# Beside the edges of a clip, not on them: on one, the last bit of an exp decides.
NEAR = st.floats(-3, 3) | st.sampled_from([0.0, *(e + s for e in EDGES for s in (1e-7, -1e-7))])
ANY = NEAR | st.sampled_from([1e4, -1e4, 20.0, -20.0, 19.9, -19.9, *EDGES])
SIZES = st.integers(0, 6)
ADVANTAGES = st.floats(-3, 3, width=32) | st.sampled_from([0.0, 1.0, -1.0])

torch.set_num_threads(1)
every_preset = pytest.mark.parametrize("name", sorted(PRESETS))
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
more = settings(few, max_examples=80)


@dataclass(frozen=True)
class Case:
    """Turn sizes by trajectory, and numbers for their tokens."""

    sizes: list[list[int]]
    lp_T: Tensor
    old_T: Tensor
    a_T: Tensor
    part_of_B: list[int]
    """A split into whole trajectories."""

    @property
    def segments(self) -> Segments:
        turns = [n for sizes in self.sizes for n in sizes]
        of_trajectory = [sum(sizes) for sizes in self.sizes]
        return Segments(
            torch.repeat_interleave(torch.tensor(turns)),
            torch.repeat_interleave(torch.tensor(of_trajectory)),
            len(turns),
            len(of_trajectory),
        )

    def tokens(self, objective: Objective) -> Tokens:
        weight_T = reduce_weight(objective.reduce, self.segments).to(self.lp_T)
        correction_T = None
        if objective.correction != "none":
            correction_T = torch.linspace(0, 2, len(self.lp_T)).to(self.lp_T)
        return Tokens(self.old_T, self.a_T, weight_T, self.segments, correction_T)

    def trajectories(self) -> Iterator[list[list[int]]]:
        """Token numbers by turn, of each trajectory."""
        token = 0
        for sizes in self.sizes:
            turns = []
            for size in sizes:
                turns.append(list(range(token, token + size)))
                token += size
            yield turns


@st.composite
def cases(
    draw: st.DrawFn,
    log_ratios: st.SearchStrategy[float] = NEAR,
    turn_sizes: st.SearchStrategy[int] = SIZES,
    num_turns: int = 5,
) -> Case:
    """At least one trained token in all; a positive log-ratio comes from a small old log-prob."""
    some_turns = st.lists(turn_sizes, min_size=1, max_size=num_turns)
    sizes = draw(st.lists(some_turns, min_size=1, max_size=4).filter(lambda s: sum(map(sum, s))))
    num = sum(map(sum, sizes))
    d = draw(st.lists(log_ratios, min_size=num, max_size=num))
    a = draw(st.lists(ADVANTAGES, min_size=num, max_size=num))
    parts = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    base_T = -torch.linspace(0.1, 5, num, dtype=torch.float64)
    d_T = torch.tensor(d, dtype=torch.float64)
    a_T = torch.tensor(a, dtype=torch.float64)
    return Case(sizes, base_T + d_T.clamp(max=0), base_T - d_T.clamp(min=0), a_T, parts)


def with_gradient(
    objective: Objective, lp_T: Tensor, tokens: Tokens, terms: BatchTerms
) -> tuple[Tensor, Tensor]:
    lp_T = lp_T.detach().requires_grad_()
    total = loss(objective, lp_T, tokens, terms)
    return total.detach(), torch.autograd.grad(total, lp_T)[0]


@every_preset
@few
@given(case=cases(ANY))
def test_loss_and_gradient_are_finite_in_float32_whatever_the_log_ratio(
    name: str, case: Case
) -> None:
    objective = PRESETS[name]
    case = replace(case, lp_T=case.lp_T.float(), old_T=case.old_T.float(), a_T=case.a_T.float())
    tokens = case.tokens(objective)
    terms = batch_terms(objective, case.lp_T, tokens)
    total, gradient_T = with_gradient(objective, case.lp_T, tokens, terms)
    assert total.isfinite() and gradient_T.isfinite().all()


@every_preset
@few
@given(case=cases())
def test_losses_of_any_split_into_whole_trajectories_add_up(name: str, case: Case) -> None:
    objective = PRESETS[name]
    tokens = case.tokens(objective)
    terms = batch_terms(objective, case.lp_T, tokens)
    whole, gradient_T = with_gradient(objective, case.lp_T, tokens, terms)
    total, found_T = torch.zeros_like(whole), torch.zeros_like(gradient_T)
    part_of_T = torch.tensor(case.part_of_B)[case.segments.trajectory_of_T]
    for part in range(3):
        token_S = (part_of_T == part).nonzero().squeeze(-1)
        of_part, found_T[token_S] = with_gradient(
            objective, case.lp_T[token_S], tokens.take(token_S), terms.take(token_S)
        )
        total += of_part
    torch.testing.assert_close((total, found_T), (whole, gradient_T), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(PRESETS))
@few
@given(case=cases(ANY))
def test_zero_advantage_has_zero_gradient(name: str, case: Case) -> None:
    tokens = replace(case, a_T=torch.zeros_like(case.a_T)).tokens(PRESETS[name])
    terms = batch_terms(PRESETS[name], case.lp_T, tokens)
    assert with_gradient(PRESETS[name], case.lp_T, tokens, terms)[1].abs().max() == 0


@pytest.mark.parametrize("ratio", RATIOS)
@few
@given(case=cases())
def test_identical_policies_have_ratio_one_no_divergence_and_no_clip(
    ratio: Ratio, case: Case
) -> None:
    objective = replace(PRESETS["so-grpo"], ratio=ratio)
    d_T = log_ratio(case.old_T, case.old_T)
    assert (importance_ratio(ratio, d_T, case.segments) == 1).all()
    assert kl_k3(d_T).abs().max() == 0
    terms = batch_terms(objective, case.old_T, case.tokens(objective))
    assert terms.clip_fraction == 0 and not terms.masked_T.any()


@few
@given(case=cases(ANY, turn_sizes=st.integers(0, 1)))
def test_turns_of_one_token_make_the_turn_ratios_the_token_ratio(case: Case) -> None:
    d_T = log_ratio(case.lp_T, case.old_T)
    expected_T = importance_ratio("token", d_T, case.segments)
    for kind in ("turn", "turn-arithmetic"):
        torch.testing.assert_close(importance_ratio(kind, d_T, case.segments), expected_T)


@few
@given(case=cases(ANY, num_turns=1))
def test_trajectories_of_one_turn_make_the_turn_ratio_the_sequence_ratio(case: Case) -> None:
    d_T = log_ratio(case.lp_T, case.old_T)
    expected_T = importance_ratio("sequence", d_T, case.segments)
    torch.testing.assert_close(importance_ratio("turn", d_T, case.segments), expected_T)


def ratio_by_loop(kind: Ratio, d: list[float], turns: list[list[int]]) -> dict[int, float]:
    """Of each token of one trajectory."""
    own = [d[t] for turn in turns for t in turn]
    w: dict[int, float] = {}
    for turn in turns:
        for t in turn:
            w[t] = {
                "none": 1.0,
                "token": math.exp(d[t]),
                "turn": math.exp(sum(d[s] for s in turn) / len(turn)),
                "turn-arithmetic": sum(math.exp(d[s]) for s in turn) / len(turn),
                "sequence": math.exp(sum(own) / len(own)),
                "sequence-product": math.exp(max(-20.0, min(20.0, sum(own)))),
            }[kind]
    return w


@pytest.mark.parametrize("kind", RATIOS)
@few
@given(case=cases(ANY))
def test_ratios_equal_a_loop_over_turns(kind: Ratio, case: Case) -> None:
    d_T = log_ratio(case.lp_T, case.old_T)
    w: dict[int, float] = {}
    for turns in case.trajectories():
        w |= ratio_by_loop(kind, d_T.tolist(), turns)
    expected_T = torch.tensor([w[t] for t in range(len(d_T))], dtype=torch.float64)
    found_T = importance_ratio(kind, d_T, case.segments)
    torch.testing.assert_close(found_T, expected_T, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", REDUCES)
@few
@given(case=cases())
def test_reduce_weights_equal_a_loop_over_turns_and_sum_to_one(kind: Reduce, case: Case) -> None:
    full = [[turn for turn in turns if turn] for turns in case.trajectories()]
    full = [turns for turns in full if turns]
    expected: list[float] = []
    for turns in full:
        for turn in turns:
            weight = {
                "token": 1 / len(case.a_T),
                "trajectory": 1 / (len(full) * sum(map(len, turns))),
                "turn": 1 / (len(full) * len(turns) * len(turn)),
            }[kind]
            expected += [weight] * len(turn)
    weight_T = reduce_weight(kind, case.segments)
    assert weight_T.tolist() == pytest.approx(expected, rel=1e-6)
    assert weight_T.sum().item() == pytest.approx(1, abs=1e-5)


@few
@given(case=cases(), decay=st.floats(0, 1))
def test_decayed_sums_equal_a_loop_from_the_end(case: Case, decay: float) -> None:
    value, of = case.a_T.tolist(), case.segments.trajectory_of_T.tolist()
    expected = [0.0] * len(value)
    for n in reversed(range(len(value))):
        behind = expected[n + 1] if n + 1 < len(value) and of[n + 1] == of[n] else 0.0
        expected[n] = value[n] + decay * behind
    found_N = segment_decayed_sum(case.a_T, case.segments.trajectory_of_T, decay)
    assert found_N.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@few
@given(case=cases(), gamma=st.floats(0.01, 1), lam=st.floats(0, 1), by_turn=st.booleans())
def test_gae_equals_a_loop_from_the_end(
    case: Case, gamma: float, lam: float, by_turn: bool
) -> None:
    """Steps are tokens, or the first tokens of turns."""
    steps = [[t for turn in ts for t in (turn[:1] if by_turn else turn)]
             for ts in case.trajectories()]  # fmt: skip
    reward, value = case.a_T.tolist(), case.lp_T.tolist()
    expected: list[float] = []
    for tokens in steps:
        advantages = [0.0]
        for t, after in reversed(list(pairwise([*tokens, None]))):
            delta = reward[t] + gamma * (0.0 if after is None else value[after]) - value[t]
            advantages.insert(0, delta + gamma * lam * advantages[0])
        expected += advantages[:-1]
    token_N = torch.tensor([t for tokens in steps for t in tokens])
    of_N = case.segments.trajectory_of_T[token_N]
    found = gae(case.a_T[token_N], case.lp_T[token_N], of_N, gamma, lam)
    assert found.advantage_N.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found.return_N, found.advantage_N + case.lp_T[token_N])


@pytest.mark.parametrize("ratio", ["token", "turn"])
@more
@given(case=cases(st.floats(-19, 19) | NEAR))
def test_the_clipping_bias_is_what_the_clip_took_from_the_gradient(
    ratio: Ratio, case: Case
) -> None:
    """By token always; by turn where its tokens share an advantage, as they do in so-ppo and
    so-grpo."""
    if ratio == "turn":
        first_K = {k: t for t, k in reversed(list(enumerate(case.segments.turn_of_T.tolist())))}
        of_first = [first_K[k] for k in case.segments.turn_of_T.tolist()]
        case = replace(case, a_T=case.a_T[torch.tensor(of_first)])
    objective = replace(PRESETS["so-grpo"], ratio=ratio)
    tokens, lp_T = case.tokens(objective), case.lp_T.clone().requires_grad_()
    w_T = importance_ratio(ratio, log_ratio(lp_T, tokens.old_T), tokens.segments)
    with_clip = torch.autograd.grad(-loss(objective, lp_T, tokens), lp_T, retain_graph=True)[0]
    without = torch.autograd.grad((tokens.weight_T * w_T * tokens.a_T).sum(), lp_T)[0]
    clipped_T = clipped(objective, w_T, tokens.a_T)
    coefficient_T = bias_coefficient(w_T, tokens.a_T, tokens.weight_T, clipped_T)
    size = 1 + without.abs().max().item()
    torch.testing.assert_close(
        coefficient_T / size, (without - with_clip) / size, rtol=0, atol=1e-9
    )


@few
@given(case=cases())
def test_the_clipping_bias_of_turns_equals_a_loop_over_clipped_tokens(case: Case) -> None:
    """C = sum over clipped tokens of weight w_k A_t grad log pi_t, by its definition."""
    objective = PRESETS["st-ppo"]
    tokens = case.tokens(objective)
    d_T = log_ratio(case.lp_T, tokens.old_T)
    torch.manual_seed(0)
    gradient_TP = torch.randn(len(d_T), 3, dtype=torch.float64)
    expected_P = torch.zeros(3, dtype=torch.float64)
    for turns in case.trajectories():
        for t, w in ratio_by_loop("turn", d_T.tolist(), turns).items():
            a, weight = tokens.a_T[t].item(), tokens.weight_T[t].item()
            if (a > 0 and w > 1.2) or (a < 0 and w < 0.8):
                expected_P += weight * w * a * gradient_TP[t]
    w_T = importance_ratio("turn", d_T, tokens.segments)
    clipped_T = clipped(objective, w_T, tokens.a_T)
    found_P = bias_coefficient(w_T, tokens.a_T, tokens.weight_T, clipped_T) @ gradient_TP
    torch.testing.assert_close(found_P, expected_P, rtol=1e-9, atol=1e-9)


@few
@given(case=cases(st.floats(-1, 1) | NEAR), bound=st.floats(1e-4, 1))
def test_the_second_moment_mask_takes_the_largest_and_no_more_than_it_must(
    case: Case, bound: float
) -> None:
    d_T, a_T = case.lp_T - case.old_T, case.a_T
    masked_T = clip.second_moment_mask(d_T, a_T, bound)
    candidate_T = a_T * d_T > 0
    assert not (masked_T & ~candidate_T).any()
    kept, masked = d_T[candidate_T & ~masked_T].square(), d_T[masked_T].square()
    if len(kept):
        assert kept.mean() <= bound + 1e-9
    if len(masked):
        assert (torch.cat([kept, masked.min()[None]])).mean() > bound - 1e-9
        assert not len(kept) or kept.max() <= masked.min()
