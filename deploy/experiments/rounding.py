"""How far engine and learner come apart when they round weights differently, as training goes on.

    python deploy/experiments/rounding.py models/SmolLM2-135M-Instruct

Trains float32 weights for a few steps at a rate that is usual for pretrained models, then compares
log-probs of sampled answers: by an engine and a learner that each hold the weights in float32, or
rounded to bfloat16. The engine takes token after token, the learner all at once. Ten minutes on two
cores; smollm2.py makes the folder. docs/findings.md, section 13, has what came out.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE: Final = Path(__file__).resolve().parents[1] / "configs" / "sweep-c-base.toml"
RATE: Final = 1e-5
STEPS: Final = (0, 4, 8)
NUM_TRAINED: Final = 8
NUM_COMPARED: Final = 12
NEW_TOKENS: Final = 40
TYPES: Final = (torch.float32, torch.bfloat16)
FAR: Final = 0.2


def main() -> None:
    """Print a row for each pair of types after so many steps."""
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    prompts = [
        *_prompts(folder, "one-hop-train.jsonl"),
        *_prompts(folder, "one-hop-held-out.jsonl"),
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = [_sampled(model, prompt) for prompt in prompts[:NUM_TRAINED]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    print(
        f"{'steps':>5}  {'moved':>6}  {'engine':<9} {'learner':<9} {'mean':>7} {'max':>6}", end=""
    )
    print(f" {f'> {FAR}':>7}")
    before = [p.detach().bfloat16() for p in model.parameters()]
    for last, steps in itertools.pairwise((0, *STEPS)):
        for _ in range(steps - last):
            _step(model, optimizer, trained)
        moved = _share_moved(before, model)
        answers = [_sampled(model, prompt) for prompt in prompts[NUM_TRAINED:]]
        held = {dtype: copy.deepcopy(model).to(dtype) for dtype in TYPES}
        for engine, learner in itertools.product(TYPES, TYPES):
            gap_T = torch.cat(
                [_one_by_one(held[engine], *a) - _at_once(held[learner], *a) for a in answers]
            ).abs()
            names = (str(dtype).removeprefix("torch.") for dtype in (engine, learner))
            print(
                f"{steps:>5}  {moved:>6.1%}  {next(names):<9} {next(names):<9} "
                f"{gap_T.mean():>7.4f} {gap_T.max():>6.2f} {(gap_T > FAR).float().mean():>7.1%}",
                flush=True,
            )


def _prompts(folder: Path, name: str) -> list[Tensor]:
    """[1, P] token ids of the first questions of a file, within the prompt of the experiment."""
    num = NUM_TRAINED if "train" in name else NUM_COMPARED
    template = tomllib.loads(BASE.read_text())["search"]["prompt_template"].strip("\n") + "\n"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with (folder / name).open() as lines:
        questions = [json.loads(line)["question"] for line in itertools.islice(lines, num)]
    texts = [template.replace("{question}", question) for question in questions]
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


@torch.no_grad()
def _sampled(model: Any, prompt: Tensor) -> tuple[Tensor, int]:
    """[1, P + T] a prompt with a sampled answer, and P."""
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, **options), prompt.shape[1]


def _step(model: Any, optimizer: torch.optim.Optimizer, trained: list[tuple[Tensor, int]]) -> None:
    """Every other answer becomes likelier, the rest less likely."""
    optimizer.zero_grad()
    for i, (id_1N, start) in enumerate(trained):
        sign = 1 if i % 2 == 0 else -1
        (-sign * _logprobs(model, id_1N, start).exp().mean() / len(trained)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _share_moved(before: list[Tensor], model: Any) -> float:
    """Of the weights, those that bfloat16 can tell from what they were."""
    after = [p.detach().bfloat16() for p in model.parameters()]
    num_moved = sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))
    return num_moved / sum(b.numel() for b in before)


def _logprobs(model: Any, id_1N: Tensor, start: int) -> Tensor:
    """[T] of the tokens from `start` on."""
    logits_TV = model(id_1N).logits[0, start - 1 : -1].float()
    return _chosen(logits_TV, id_1N, start)


@torch.no_grad()
def _at_once(model: Any, id_1N: Tensor, start: int) -> Tensor:
    return _logprobs(model, id_1N, start)


@torch.no_grad()
def _one_by_one(model: Any, id_1N: Tensor, start: int) -> Tensor:
    cache = model(id_1N[:, : start - 1], use_cache=True).past_key_values
    rows: list[Tensor] = []
    for i in range(start - 1, id_1N.shape[1] - 1):
        out = model(id_1N[:, i : i + 1], past_key_values=cache, use_cache=True)
        rows.append(out.logits[0, -1].float())
    return _chosen(torch.stack(rows), id_1N, start)


def _chosen(logits_TV: Tensor, id_1N: Tensor, start: int) -> Tensor:
    return logits_TV.log_softmax(-1).gather(1, id_1N[0, start:, None])[:, 0]


if __name__ == "__main__":
    main()
