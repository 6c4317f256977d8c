"""The supervised warm start of the bundled policy: shape, training, and a plain decode loop.

Knows nothing of episodes: it is given token ids with a mask of the trained ones.

B episodes of a batch, L their padded length, N trained tokens of the batch, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from leeway.replay.errors import ConfigurationError

Example = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Token ids, and which of them are trained; one length."""
POOL_BATCHES: Final = 16
"""Batches sorted by length together; more pad less and mix less."""
PAD_TO: Final = 32


class WarmstartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the warm start trains."""

    num_steps: int
    batch_size: int = 256
    """Episodes of a step."""
    learning_rate: float = 1e-3
    """Peak of AdamW; rises over `warmup_steps`, then falls by a cosine to a tenth."""
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0


class Batch(NamedTuple):
    ids: torch.Tensor
    """[B, L] padded on the right."""
    before: torch.Tensor
    """[N] flat index into ids[:, :] of the token before each trained one."""
    targets: torch.Tensor
    """[N] the trained tokens."""


def build_model(vocab_size: int, eos_id: int, pad_id: int, seed: int = 0) -> LlamaForCausalLM:
    """The bundled policy's shape with fresh weights: 4.0 M parameters at a vocabulary of 2,048."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=640,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    return LlamaForCausalLM(config)


def batches(
    examples: Iterator[Example], batch_size: int, pad_id: int, seed: int
) -> Iterator[Batch]:
    """Batches of like lengths, in random order within a pool of sixteen."""
    rng = np.random.default_rng(seed)
    while True:
        pool = [next(examples) for _ in range(batch_size * POOL_BATCHES)]
        pool.sort(key=lambda example: len(example[0]))
        for k in rng.permutation(POOL_BATCHES):
            yield collated(pool[k * batch_size : (k + 1) * batch_size], pad_id)


def collated(examples: list[Example], pad_id: int) -> Batch:
    longest = max(len(ids) for ids, _ in examples)
    length = -(-longest // PAD_TO) * PAD_TO
    ids = np.full((len(examples), length), pad_id, np.int64)
    trained = np.zeros((len(examples), length), bool)
    for row, (tokens, mask) in enumerate(examples):
        ids[row, : len(tokens)] = tokens
        trained[row, : len(mask)] = mask
    trained[:, 0] = False
    flat = np.flatnonzero(trained)
    return Batch(
        torch.from_numpy(ids), torch.from_numpy(flat - 1), torch.from_numpy(ids.reshape(-1)[flat])
    )


def ahead(source: Iterable[Batch], depth: int = 8) -> Iterator[Batch]:
    """The same batches, made by a thread while the device computes."""
    queue: Queue[Batch | BaseException] = Queue(depth)

    def fill() -> None:
        try:
            for batch in source:
                queue.put(batch)
        except BaseException as error:  # re-raised where the batch is awaited
            queue.put(error)

    Thread(target=fill, daemon=True).start()
    while True:
        batch = queue.get()
        if isinstance(batch, BaseException):
            raise batch
        yield batch


def learning_rate(step: int, config: WarmstartConfig) -> float:
    """Step 0 of 100 warm-up steps -> 1e-5; the last step -> 1e-4."""
    warmup = min(config.warmup_steps, max(1, config.num_steps // 10))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.num_steps - 1 - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def train(
    model: LlamaForCausalLM,
    source: Iterator[Batch],
    config: WarmstartConfig,
    on_step: Callable[[int, float], None],
) -> None:
    """Train in place; `on_step(step, loss)` after each of `num_steps` steps.

    `loss` is the mean over steps since the last report, NaN between reports (every 50 steps):
    reading it waits for the device.
    """
    device = model.device
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    model.train()
    losses: list[torch.Tensor] = []
    for step in range(config.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss = mean_loss(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        is_report = step % 50 == 49 or step + 1 == config.num_steps or step == 0
        on_step(step + 1, float(torch.stack(losses).mean()) if is_report else math.nan)
        if is_report:
            losses.clear()


def mean_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross-entropy over the trained tokens. Logits are made for those alone."""
    device = model.device
    on_gpu = device.type == "cuda"
    ids, before, targets = (t.to(device, non_blocking=True) for t in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        # No attention mask: pads come last, and a causal model never looks at what comes later.
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, before)
        logits = model.lm_head(rows)
    return cross_entropy(logits.float(), targets)


def load_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Take the weights of a saved folder of the same shape."""
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ConfigurationError(f"{folder} does not hold a model of the bundled policy's shape")


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """A Hugging Face folder in bfloat16, without generation settings."""
    import copy

    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).cpu().bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def decode(
    model: LlamaForCausalLM,
    contexts: list[list[int]],
    *,
    stop_ids: Collection[int],
    pad_id: int,
    max_tokens: int,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """One turn for every context, ended by a stop token (kept). Greedy without a generator.

    Plain transformers with a growing cache; contexts are padded on the left.
    """
    device = model.device
    length = max(map(len, contexts))
    ids = torch.full((len(contexts), length), pad_id)
    seen = torch.zeros((len(contexts), length + max_tokens), dtype=torch.long)
    for row, context in enumerate(contexts):
        ids[row, length - len(context) :] = torch.tensor(context)
        seen[row, length - len(context) :] = 1
    ids, seen = ids.to(device), seen.to(device)
    positions = (seen[:, :length].cumsum(1) - 1).clamp(min=0)
    stops = torch.tensor(sorted(stop_ids), device=device)
    is_done = torch.zeros(len(contexts), dtype=torch.bool, device=device)
    cache: Any = DynamicCache()
    made: list[torch.Tensor] = []
    for k in range(max_tokens):
        output = model(
            input_ids=ids,
            attention_mask=seen[:, : length + k],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float()
        if generator is None:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        token = torch.where(is_done, pad_id, token)
        made.append(token)
        is_done |= torch.isin(token, stops)
        if bool(is_done.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
    rows = torch.stack(made, 1).tolist()
    return [until_stop(row, stop_ids) for row in rows]


def until_stop(row: list[int], stop_ids: Collection[int]) -> list[int]:
    """Up to and with the first stop token: [5, 9, 0, 0] with stop 9 -> [5, 9]."""
    for k, token in enumerate(row):
        if token in stop_ids:
            return row[: k + 1]
    return row


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start
