"""Take out of the bundled tokenizer what the warm start hardly ever shows the policy.

The vocabulary is made from the whole corpus, held-out countries included, so that some of their
names became single tokens (` Japan`), and no training episode may name them. The policy then meets
a token whose embedding nobody trained. Without its merge the name is spelled in trained pieces.

    python -m leeway.actors.search.prune_tokenizer [--episodes 40000] [--min-share 0.003]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from leeway.actors.config import bundled_dir
from leeway.actors.search.script import CARELESS, episodes

CHUNK = 2000
COMMON = 10
SEED = 77


def main() -> None:
    """Rewrites tokenizer.json of the bundle and of the bundled model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=40_000)
    parser.add_argument("--min-share", type=float, default=0.003)
    options = parser.parse_args()
    path = bundled_dir() / "tokenizer.json"
    counts = count_tokens(path, options.episodes)
    content = json.loads(path.read_text())
    merges = [tuple(pair) for pair in content["model"]["merges"]]
    kept = prune(merges, counts, options.min_share * options.episodes)
    content["model"]["merges"] = [list(pair) for pair in kept]
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    for target in (path, bundled_dir() / "model" / "tokenizer.json"):
        target.write_text(text)
    gone = [a + b for a, b in merges if (a, b) not in set(kept)]
    print(f"{len(gone)} of {len(merges)} merges taken out: {' '.join(gone)}")


def count_tokens(path: Path, num_episodes: int) -> Counter[str]:
    """How often each token occurs in scripted episodes."""
    tokenizer = Tokenizer.from_file(str(path))
    counts: Counter[int] = Counter()
    source = episodes(SEED, CARELESS)
    for _ in range(num_episodes // CHUNK):
        texts = [s.text for e in itertools.islice(source, CHUNK) for s in e.segments]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            counts.update(encoding.ids)
    return Counter({tokenizer.id_to_token(i) or "": n for i, n in counts.items()})


def prune(
    merges: Sequence[tuple[str, str]], counts: Mapping[str, int], min_count: float
) -> list[tuple[str, str]]:
    """The merges without those whose token is rarer than `min_count`.

    A rare token that only serves to build others takes them with it, unless one of them is common,
    COMMON times `min_count` or more. min_count 5:

        a+b, ab+c   counts ab 0, abc 9    -> neither: ` Japan` goes, and ` Japanese` with it
        a+b, ab+c   counts ab 0, abc 90   -> both stay
    """
    builds: dict[str, set[str]] = defaultdict(set)
    for first, second in merges:
        builds[first].add(first + second)
        builds[second].add(first + second)
    gone: set[str] = set()
    for token in (first + second for first, second in merges):
        family = _built_from(token, builds)
        is_rare = counts.get(token, 0) < min_count
        if is_rare and all(counts.get(t, 0) < COMMON * min_count for t in family):
            gone |= {token} | family
    return [(first, second) for first, second in merges if first + second not in gone]


def _built_from(token: str, builds: Mapping[str, set[str]]) -> set[str]:
    """Every token that is built from `token`, directly or not."""
    found: set[str] = set()
    todo = [token]
    while todo:
        new = builds.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


if __name__ == "__main__":
    main()
