"""Llama-shaped networks over a static cache of keys and values, for `TorchPolicy`.

The cache has a fixed number of slots; a sequence lives in one slot from its first token to its
last. Two ways through the same layers:

    logits         rows of any length, packed one behind another: prompts, and on a CPU single
                   tokens too
    static_step    one token a row at fixed shapes, on a GPU, which a CUDA graph can replay

On a GPU both are made of the kernels of decode_kernels.py, on a CPU of torch's operations.

Letters: `N` new tokens of all rows, `B` rows, `T` new tokens of one row, `S` slots, `M` cache
positions, `L` positions read, `H` hidden width, `Q` query heads, `K` key/value heads, `G` = Q / K,
`D` head width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from leeway.replay.errors import ConfigurationError

MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that are decoded here: RMSNorm, rotary positions, grouped heads, SwiGLU."""
MANY_ROWS: Final = 64
"""Beyond so many rows, programs of the kernels take so many each: with fewer, weights would be read
too often."""


class Feed(NamedTuple):
    """New tokens of one row."""

    slot: int
    start: int
    """Position of the first id; keys and values of all positions before it stand in the slot."""
    ids: list[int]


class Sampled(NamedTuple):
    """One more token of each row."""

    tokens: list[int]
    logprobs: list[float]


class Linear(NamedTuple):
    """A linear layer."""

    weight: Tensor
    bias: Tensor | None


class _Layer(NamedTuple):
    """Weights of one block. Tensors of the module itself: they change when it loads others."""

    input_norm_H: Tensor
    qkv: Linear
    """The three projections, outputs side by side."""
    head_norms: tuple[Tensor, Tensor] | None
    """Weights [D] of the norms of single heads, of queries and of keys, which Qwen3 has."""
    out: Linear
    mlp_norm_H: Tensor
    gate_up: Linear
    down: Linear


_Attend = Callable[[Tensor, int], Tensor]
"""(queries [N, Q, D], number of the layer) -> what each token read [N, Q * D]."""


class _Places(NamedTuple):
    """Where tokens stand: slots [N], positions [N], cosines and signed sines [N, 1, D]."""

    slot_N: Tensor
    position_N: Tensor
    cos: Tensor
    sin: Tensor


class _Sent(NamedTuple):
    """New tokens of all rows, on the device: ids [N], slots [N], positions [N], and which of them
    are the last of each row [B]."""

    id_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    end_B: Tensor


def _send(feeds: Sequence[Feed], device: torch.device) -> _Sent:
    """By one transfer: on a GPU each is waited for."""
    slots, starts, lengths = np.array(
        [(feed.slot, feed.start, len(feed.ids)) for feed in feeds], np.int64
    ).T
    ends = lengths.cumsum()
    places = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    ids = [i for feed in feeds for i in feed.ids]
    numbers = (ids, np.repeat(slots, lengths), places, ends - 1)
    sent = torch.from_numpy(np.concatenate(numbers, dtype=np.int64)).to(device)
    return _Sent(*sent.split([len(part) for part in numbers]))


class Decoder:
    """The network of a transformers module, with `num_slots` sequences of cached keys and values.

    The module's query, key and value weights become views of one tensor, and so do its gate and up
    weights: one product instead of three. It goes on loading, saving and running as before, and
    what `load_state_dict` copies into it is used here from the next call on; `assign=True`, and
    moving the module, would part the two.
    """

    def __init__(self, model: torch.nn.Module, num_slots: int, max_len: int) -> None:
        check_architecture(model, max_len)
        network: Any = model
        config = network.config
        self._num_q = config.num_attention_heads
        self._num_kv = config.num_key_value_heads
        self._eps = config.rms_norm_eps
        self._layers = [_layer(block) for block in network.model.layers]
        self._embedding_VH: Tensor = network.model.embed_tokens.weight
        self._norm_H: Tensor = network.model.norm.weight
        self._head = Linear(network.lm_head.weight, network.lm_head.bias)
        self.device = self._embedding_VH.device
        self.num_slots = num_slots
        # One position more than a sequence has: rows that only fill a batch up write there.
        self.num_positions = max_len + 1
        self.vocab_size: int = self._head.weight.shape[0]
        self._rotary_2MD = _rotary(network.model.rotary_emb, self)
        head_width = self._rotary_2MD.shape[2]
        # Zeros, not garbage: rows that only fill a batch up read what nobody may have written.
        self._cache = torch.zeros(
            (num_slots, len(self._layers), 2, self._num_kv, self.num_positions, head_width),
            dtype=self.dtype,
            device=self.device,
        )
        self._layer_caches = self._cache.unbind(1)
        self._scale = head_width**-0.5
        self.uses_kernels = self.device.type == "cuda"
        """Whether passes are made of our own kernels. Of torch's operations they are elsewhere."""
        self._unread = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)
        if self.uses_kernels:
            self._compile()

    def _compile(self) -> None:
        """Run every kernel once, for few rows and for many, so that no request waits for a
        compiler."""
        try:
            for num_rows in (1, MANY_ROWS + 1):
                state_4B = torch.zeros(4, num_rows, dtype=torch.long, device=self.device)
                state_4B[2] = self.last_position
                uniform_BV = torch.zeros(num_rows, self.vocab_size, device=self.device)
                out_2B = torch.zeros(2, num_rows, dtype=torch.float64, device=self.device)
                with torch.inference_mode(), self.current():
                    self.static_step(state_4B, uniform_BV, out_2B)
        except (ImportError, RuntimeError) as error:
            if isinstance(error, ImportError) or "compiler" in str(error).lower():
                raise ConfigurationError(
                    f"the torch policy needs Triton and a C compiler on a GPU ({error}); install "
                    'triton, gcc and the headers of Python, or set policy.backend = "vllm"'
                ) from error
            raise

    def current(self) -> AbstractContextManager[None]:
        """Its GPU, if it is on one, is the calling thread's meanwhile: kernels start on that one,
        wherever the tensors are that they are given."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @property
    def last_position(self) -> int:
        """Of the cache. No sequence comes so far."""
        return self.num_positions - 1

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of the cache."""
        return self._embedding_VH.dtype

    def copy(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of one slot to another, in all layers."""
        cache = self._cache[..., :num_positions, :]
        cache[target] = cache[source]

    def logits(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits [B, V] behind the last new token of each row; its keys and values are kept."""
        sent = _send(feeds, self.device)
        if self.uses_kernels:
            with self.current():
                return self._by_kernels(*sent)
        id_N, slot_N, position_N, end_B = sent
        places = self._places(slot_N, position_N)
        x_NH = F.embedding(id_N, self._embedding_VH)
        attend = self._attention(feeds)
        for i, layer in enumerate(self._layers[:-1]):
            q_NQD = self._write(x_NH, layer, self._layer_caches[i], places)
            x_NH = self._through(x_NH, attend(q_NQD, i), layer)
        # Behind the last layer only the last token of each row is read. Of five layers, that saves
        # a sixth of a prompt's work.
        layer = self._layers[-1]
        ends = [Feed(feed.slot, feed.start + len(feed.ids) - 1, feed.ids[-1:]) for feed in feeds]
        q_BQD = self._write(x_NH, layer, self._layer_caches[-1], places)[end_B]
        read_BH = self._attention(ends)(q_BQD, len(self._layers) - 1)
        x_BH = self._norm(self._through(x_NH[end_B], read_BH, layer), self._norm_H)
        return F.linear(x_BH, *self._head)

    def static_step(self, state_4B: Tensor, uniform_BV: Tensor, out_2B: Tensor) -> None:
        """One more token of every row, on the device alone, which is current.

        `state_4B` holds token, slot, position and temperature (0 or 1) of each row. Token and
        position are replaced by the sampled token and the next position; `out_2B` receives the
        token and its log-prob. Rows at the cache's last position, where no sequence comes, only
        fill the batch up.
        """
        from leeway.actors.decode_kernels import sample_next

        logits_BV = self._by_kernels(*state_4B[:3])
        sample_next(logits_BV, uniform_BV, state_4B, out_2B, self.last_position)

    def _by_kernels(
        self, id_N: Tensor, slot_N: Tensor, position_N: Tensor, end_B: Tensor | None = None
    ) -> Tensor:
        """Logits [B, V] behind the tokens `end_B`, behind all without it."""
        # Triton comes with the builds of torch for GPUs alone.
        from leeway.actors import decode_kernels as kernels

        x_NH = F.embedding(id_N, self._embedding_VH)
        if end_B is not None and len(id_N) > MANY_ROWS:
            return self._of_prompts(x_NH, slot_N, position_N, end_B)
        for i, (layer, cache) in enumerate(zip(self._layers, self._layer_caches, strict=True)):
            q_NQD = kernels.project(
                x_NH,
                layer.input_norm_H,
                layer.qkv,
                layer.head_norms,
                self._rotary_2MD,
                cache,
                slot_N,
                position_N,
                self._eps,
            )
            if end_B is not None and i == len(self._layers) - 1:
                x_NH, q_NQD = x_NH[end_B], q_NQD[end_B]
                slot_N, position_N = slot_N[end_B], position_N[end_B]
            read_NQD = kernels.read_cache(q_NQD, cache, slot_N, position_N, self._scale)
            kernels.add_linear(x_NH, read_NQD.flatten(1), layer.out)
            inner_NI = kernels.gated(x_NH, layer.gate_up, layer.mlp_norm_H, self._eps)
            kernels.add_linear(x_NH, inner_NI, layer.down)
        return kernels.linear(x_NH, self._head, self._norm_H, self._eps)

    def _of_prompts(
        self, x_NH: Tensor, slot_N: Tensor, position_N: Tensor, end_B: Tensor
    ) -> Tensor:
        """Logits [B, V] as `_by_kernels` has them, with torch's products: those of many rows are
        several times as fast as a kernel that is made for few."""
        from leeway.actors.decode_kernels import read_cache

        places = self._places(slot_N, position_N)
        for i, (layer, cache) in enumerate(zip(self._layers, self._layer_caches, strict=True)):
            q_NQD = self._write(x_NH, layer, cache, places)
            if i == len(self._layers) - 1:
                x_NH, q_NQD = x_NH[end_B], q_NQD[end_B]
                slot_N, position_N = slot_N[end_B], position_N[end_B]
            read_NQD = read_cache(q_NQD.contiguous(), cache, slot_N, position_N, self._scale)
            x_NH = self._through(x_NH, read_NQD.flatten(1), layer)
        return F.linear(self._norm(x_NH, self._norm_H), *self._head)

    def _places(self, slot_N: Tensor, position_N: Tensor) -> _Places:
        cos, sin = self._rotary_2MD[:, position_N, None]
        return _Places(slot_N, position_N, cos, sin)

    def _write(self, x_NH: Tensor, layer: _Layer, cache: Tensor, places: _Places) -> Tensor:
        """Queries [N, Q, D] of the tokens; their keys and values go into the layer's cache."""
        slot_N, position_N, cos, sin = places
        qk, v_NKD = self._project(x_NH, layer)
        qk = _rotate(qk, cos, sin)
        cache[slot_N, 0, :, position_N] = qk[:, self._num_q :]
        cache[slot_N, 1, :, position_N] = v_NKD
        return qk[:, : self._num_q]

    def _project(self, x_NH: Tensor, layer: _Layer) -> tuple[Tensor, Tensor]:
        """Queries and keys [N, Q + K, D] before their rotation, and values [N, K, D]."""
        qkv = F.linear(self._norm(x_NH, layer.input_norm_H), *layer.qkv)
        qk, v_NKD = qkv.unflatten(1, (self._num_q + 2 * self._num_kv, -1)).split(
            [self._num_q + self._num_kv, self._num_kv], dim=1
        )
        return self._norm_heads(qk, layer), v_NKD

    def _through(self, x_NH: Tensor, read_NH: Tensor, layer: _Layer) -> Tensor:
        """The block's output, from its input and from what attention read [N, Q * D]."""
        x_NH = _added(x_NH, read_NH, *layer.out)
        gate, up = F.linear(self._norm(x_NH, layer.mlp_norm_H), *layer.gate_up).chunk(2, -1)
        return _added(x_NH, F.silu(gate) * up, *layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _norm_heads(self, qk_NXD: Tensor, layer: _Layer) -> Tensor:
        """Normalised by head, where the network does that."""
        if layer.head_norms is None:
            return qk_NXD
        q_norm_D, k_norm_D = layer.head_norms
        q_NQD, k_NKD = qk_NXD.split([self._num_q, self._num_kv], dim=1)
        return torch.cat([self._norm(q_NQD, q_norm_D), self._norm(k_NKD, k_norm_D)], dim=1)

    def _attention(self, feeds: Sequence[Feed]) -> _Attend:
        lengths = [len(feed.ids) for feed in feeds]
        # One view and one split for all layers, [K, L, D] each: with a small network, making views
        # costs as much as the products.
        kv_of_row = [
            self._cache[feed.slot, ..., : feed.start + len(feed.ids), :].flatten(0, 1).unbind()
            for feed in feeds
        ]

        def attend(q_NQD: Tensor, layer: int) -> Tensor:
            rows = zip(q_NQD.split(lengths), kv_of_row, strict=True)
            read = [self._attend_row(q, kv[2 * layer], kv[2 * layer + 1]) for q, kv in rows]
            return torch.cat(read).flatten(1)

        return attend

    def _attend_row(self, q_TQD: Tensor, k_KLD: Tensor, v_KLD: Tensor) -> Tensor:
        """What one row's last T tokens read [T, Q, D] of all its keys and values."""
        num_new, start = len(q_TQD), k_KLD.shape[1] - len(q_TQD)
        if num_new == 1:
            # Two products are faster here than the fused kernel, which is made for many queries.
            q_KGD = q_TQD.view(self._num_kv, -1, q_TQD.shape[-1])
            score_KGL = torch.baddbmm(self._unread, q_KGD, k_KLD.mT, beta=0, alpha=self._scale)
            return torch.bmm(score_KGL.softmax(-1), v_KLD).view(q_TQD.shape)
        read_QTD = F.scaled_dot_product_attention(
            q_TQD.transpose(0, 1)[None],
            k_KLD.repeat_interleave(self._num_q // self._num_kv, 0)[None],
            v_KLD.repeat_interleave(self._num_q // self._num_kv, 0)[None],
            attn_mask=_causal_TL(num_new, start, k_KLD.device) if start else None,
            is_causal=start == 0,
        )[0]
        return read_QTD.transpose(0, 1)


class EagerStep:
    """Next tokens of several rows, and their log-probs."""

    def __init__(self, decoder: Decoder, generator: torch.Generator) -> None:
        self._decoder = decoder
        self._generator = generator

    def __call__(self, feeds: Sequence[Feed], temperatures: Sequence[float]) -> list[Sampled]:
        """One token a row. `temperatures` are 0 or 1, one a row."""
        logits_BV = self._decoder.logits(feeds)
        device = logits_BV.device
        uniform_BV = torch.rand(logits_BV.shape, generator=self._generator, device=device)
        token_B, lp_B = sample(logits_BV, torch.tensor(temperatures, device=device), uniform_BV)
        # By one transfer, in which both are exact.
        tokens, logprobs = torch.stack((token_B.double(), lp_B.double())).tolist()
        return [Sampled([int(token) for token in tokens], logprobs)]


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] at temperature 1.

    Gumbel-max: exact samples at temperature 1, the mode at 0. `uniform_BV` is in [0, 1).
    """
    lp_BV = logits_BV.float().log_softmax(-1)
    gumbel_BV = -torch.log(-torch.log(uniform_BV.clamp(1e-20, 1 - 1e-7)))
    token_B = torch.addcmul(lp_BV, gumbel_BV, temperature_B[:, None]).argmax(-1)
    return token_B, lp_BV.gather(1, token_B[:, None])[:, 0]


def check_architecture(model: torch.nn.Module, max_len: int) -> None:
    """Raise ConfigurationError for a network that would not be decoded right."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    problem = None
    if config.model_type not in MODEL_TYPES:
        problem = f"the architecture {config.model_type!r}"
    elif config.hidden_act != "silu":
        problem = f"{config.model_type!r} with the activation {config.hidden_act!r}"
    elif window is not None and window < max_len:
        problem = f"{config.model_type!r} with a sliding window of {window} tokens"
    elif rope in ("dynamic", "longrope") and config.max_position_embeddings < max_len:
        problem = f"{config.model_type!r} with {rope} positions beyond its original length"
    if problem:
        raise ConfigurationError(
            f'the torch policy cannot decode {problem}; set policy.backend = "vllm"'
        )


def _layer(block: Any) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    return _Layer(
        input_norm_H=block.input_layernorm.weight,
        qkv=_side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(
            (attention.q_norm.weight, attention.k_norm.weight)
            if hasattr(attention, "q_norm")
            else None
        ),
        out=Linear(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm_H=block.post_attention_layernorm.weight,
        gate_up=_side_by_side(mlp.gate_proj, mlp.up_proj),
        down=Linear(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _side_by_side(*linears: torch.nn.Linear) -> Linear:
    """One weight and bias of which those of `linears` become views."""
    weight = _joined([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(weight, _joined(biases) if biases else None)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    parts = joined.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


def _rotary(rotary_emb: Any, decoder: Decoder) -> Tensor:
    """[2, M, D] cosines and signed sines of all positions; see _rotate for the sign."""
    positions = torch.arange(decoder.num_positions, device=decoder.device)[None]
    like = torch.empty(0, dtype=decoder.dtype, device=decoder.device)
    cos_MD, sin_MD = (table[0] for table in rotary_emb(like, positions))
    half = sin_MD.shape[1] // 2
    return torch.stack([cos_MD, torch.cat([-sin_MD[:, :half], sin_MD[:, half:]], dim=1)])


def _added(x_NH: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + weight y + bias, in place of x: one kernel."""
    return x_NH.addmm_(y, weight.T) if bias is None else x_NH.add_(bias).addmm_(y, weight.T)


def _rotate(x_NXD: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary positions: the halves (a, b) of a head become (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x_NXD * cos, x_NXD.roll(x_NXD.shape[-1] // 2, -1), signed_sin)


def _causal_TL(num_new: int, start: int, device: torch.device) -> Tensor:
    """2 new tokens behind 3 -> [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]."""
    return torch.ones(num_new, start + num_new, dtype=torch.bool, device=device).tril(start)
