"""Decoding steps replayed as CUDA graphs: one launch for a burst of them.

A burst is captured the first time its number of rows is met (powers of two). Weights and cache are
read where they lie, so a graph outlives every change of weights.

Letters: `B` rows of a graph, `S` slots, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from leeway.actors.decoder import Decoder, Feed, Sampled

MIN_ROWS: Final = 8
"""Rows of the smallest graph; fewer would not be faster."""
BURST: Final = 4
"""Steps in a row without the host. More of them would go on behind more rows' ends."""


class GraphStep:
    """BURST tokens for each of several rows; see EagerStep, which it stands in for.

    The graph feeds its tokens back to its own input, so that the host is asked once a burst. What
    comes behind a row's end is for the caller to drop: cheaper than to ask before every token.
    """

    def __init__(self, decoder: Decoder, generator: torch.Generator) -> None:
        num_slots, device = decoder.num_slots, decoder.device
        self._decoder = decoder
        self._generator = generator
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # Graphs read and write these, each its first B rows.
        # Rows: id, slot, position, and 1 for a sampled row or 0 for a greedy one.
        self._state_4S = torch.zeros(4, num_slots, dtype=torch.long, device=device)
        self._staged_4S = torch.zeros(4, num_slots, dtype=torch.long).pin_memory()
        self._uniform_NSV = torch.zeros(BURST, num_slots, decoder.vocab_size, device=device)
        # Token and log-prob in one tensor, so that one transfer brings both. Both are exact in it.
        self._outputs_N2S = torch.zeros(BURST, 2, num_slots, dtype=torch.float64, device=device)

    def __call__(self, feeds: Sequence[Feed], temperatures: Sequence[float]) -> list[Sampled]:
        """Next BURST tokens of each row and their log-probs."""
        with self._decoder.current():
            return self._burst(feeds, temperatures)

    def _burst(self, feeds: Sequence[Feed], temperatures: Sequence[float]) -> list[Sampled]:
        num_rows = self._num_rows(len(feeds))
        if num_rows not in self._graphs:
            self._graphs[num_rows] = self._capture(num_rows)
        self._fill(feeds, temperatures, num_rows)
        # Drawn outside the graphs, which would each need to know of the generator.
        for uniform_SV in self._uniform_NSV:
            uniform_SV[:num_rows].uniform_(generator=self._generator)
        self._graphs[num_rows].replay()
        outputs_N2B = self._outputs_N2S.cpu().numpy()[:, :, : len(feeds)]
        return [Sampled(o[0].astype(np.int64).tolist(), o[1].tolist()) for o in outputs_N2B]

    def _num_rows(self, num: int) -> int:
        """3 -> 8, 9 -> 16, at most all slots."""
        return min(self._decoder.num_slots, max(MIN_ROWS, 1 << (num - 1).bit_length()))

    def _fill(self, feeds: Sequence[Feed], temperatures: Sequence[float], num_rows: int) -> None:
        # The burst before has ended, since its tokens were read: the staging area is free.
        staged_4R = self._staged_4S[:, :num_rows].numpy()
        # Rows that fill the batch up write to the cache's last position, where no sequence comes.
        staged_4R[0], staged_4R[3] = 0, 0
        staged_4R[1] = np.arange(num_rows)
        staged_4R[2] = self._decoder.last_position
        staged_4R[:3, : len(feeds)] = np.array([[f.ids[-1], f.slot, f.start] for f in feeds]).T
        staged_4R[3, : len(feeds)] = temperatures
        # Whole tensors: a part of one would be gathered first.
        self._state_4S.copy_(self._staged_4S, non_blocking=True)

    def _capture(self, num_rows: int) -> torch.cuda.CUDAGraph:
        # Kernels are compiled and loaded on their first run, which must not be captured. Its rows
        # write to the cache's last position, where no sequence comes.
        self._state_4S[2] = self._decoder.last_position
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(num_rows)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": a learner that allocates on another thread must not break the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._run(num_rows)
        return graph

    def _run(self, num_rows: int) -> None:
        state_4B = self._state_4S[:, :num_rows]
        for uniform_SV, output_2S in zip(self._uniform_NSV, self._outputs_N2S, strict=True):
            self._decoder.static_step(state_4B, uniform_SV, output_2S)
