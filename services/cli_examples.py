"""One or more examples for every command: the end of its help page, and tested against the app.

Light: it is imported by every call of `leeway`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Example(NamedTuple):
    """A command line, without `leeway`, and what it is for."""

    line: str
    meaning: str


def _of(*pairs: tuple[str, str]) -> tuple[Example, ...]:
    return tuple(Example(line, meaning) for line, meaning in pairs)


EXAMPLES: Final[Mapping[str, tuple[Example, ...]]] = {
    "": _of(
        ("doctor", "see whether this machine can run"),
        ("train deploy/configs/demo.toml", "train the bundled policy, in minutes on two cores"),
        ("status", "watch the latest run from another terminal"),
    ),
    # ---- train
    "train": _of(
        ("train deploy/configs/demo.toml", "train on this machine"),
        ("train deploy/configs/demo.toml --set learner.num_steps=20", "the same, 20 steps"),
        ("train --resume runs/demo-1", "go on with a run that was stopped"),
        ("train deploy/configs/demo.toml --dry-run", "check everything, start nothing"),
    ),
    "rollout": _of(
        (
            "rollout deploy/configs/demo.toml --num-groups 64 --out groups.leeway",
            "play 64 groups with the policy of the file, without a learner",
        ),
        (
            "rollout deploy/configs/demo.toml --num-groups 64 --out groups.leeway --dry-run",
            "check everything, say what would be played",
        ),
    ),
    "learn": _of(
        (
            "learn deploy/configs/demo.toml --run-dir runs/demo-1",
            "the learner alone; it goes on from the last checkpoint by itself",
        ),
        (
            "learn deploy/configs/demo.toml --from groups.leeway --run-dir runs/recorded",
            "train on a recording",
        ),
    ),
    "serve": _of(
        (
            "serve deploy/configs/demo.toml --run-dir runs/demo-1",
            "engines, retriever and rollout workers alone",
        ),
    ),
    "api": _of(
        (
            "api deploy/configs/demo.toml --run-dir runs/demo-1 --host 0.0.0.0 --port 8080",
            "REST and the dashboard alone, reachable from outside",
        ),
    ),
    # ---- look
    "status": _of(
        ("status", "the latest run, live on a terminal, until Ctrl-C or its end"),
        ("status runs/demo-1 --once", "one look at a run"),
        (
            "status http://127.0.0.1:8080 --json",
            "a run elsewhere; LEEWAY_API_TOKEN holds its token",
        ),
    ),
    "timeline": _of(
        ("timeline runs/demo-1", "what a run did when, also while it goes on"),
        ("timeline runs/demo-1 --out trace.json", "the same into a file of yours"),
    ),
    "trajectories": _of(
        ("trajectories show runs/demo-1 --limit 3", "three trajectories, turn by turn"),
    ),
    "trajectories show": _of(
        ("trajectories show runs/demo-1 --limit 3", "three trajectories, turn by turn"),
        ("trajectories show runs/demo-1 --failed --html page.html", "the wrong ones, as a page"),
    ),
    "replay": _of(
        ("replay inspect runs/demo-1", "what the buffer of a run holds"),
    ),
    "replay inspect": _of(
        ("replay inspect runs/demo-1", "what the buffer holds, and who waits"),
        ("replay inspect --url redis://127.0.0.1:6379/0 --run demo-1", "a run without a directory"),
    ),
    "replay export": _of(
        ("replay export groups.leeway runs/demo-1", "every group into a file; the run goes on"),
    ),
    "replay import": _of(
        ("replay import groups.leeway runs/demo-1", "and back into a buffer"),
    ),
    # ---- judge
    "eval": _of(
        ("eval --data samples --num-questions 20", "try the command on bundled questions"),
        (
            "eval --data benchmarks --benchmarks nq,hotpotqa --model export",
            "two benchmarks of a folder",
        ),
    ),
    "sweep": _of(
        ("sweep deploy/configs/sweep-a.toml --dry-run", "check the file, print its arms"),
        ("sweep deploy/configs/sweep-a.toml", "run it; the same command goes on after a stop"),
    ),
    "sweep run": _of(
        ("sweep run deploy/configs/sweep-a.toml", "the same as without run"),
        (
            "sweep run deploy/configs/sweep-a.toml --executor processes --max-minutes 9",
            "without Ray, as many arms as nine minutes hold",
        ),
    ),
    "sweep report": _of(("sweep report runs/sweeps/sweep-a", "again, of what has ended")),
    "sweep compare": _of(
        ("sweep compare runs/sweeps/sweep-a runs/sweeps/sweep-b", "where two sweeps differ"),
    ),
    "bench": _of(
        ("bench replay --quick --json", "the replay buffer, in under 45 s"),
    ),
    "bench objective": _of(("bench objective --quick", "in under 45 s")),
    "bench logprob": _of(("bench logprob --quick", "in under 45 s")),
    "bench ctn": _of(("bench ctn --quick", "in under 45 s")),
    "bench learner": _of(("bench learner --json", "one JSON line last")),
    "bench decode": _of(("bench decode --quick", "in under 45 s")),
    "bench replay": _of(("bench replay --quick --json", "in under 45 s, one JSON line last")),
    "bench lookahead": _of(
        ("bench lookahead --quick", "in under 45 s"),
        (
            "bench lookahead --step-s 4 --play-s 6 --max-staleness 4 --max-staleness 16",
            "by figures of a run of yours: which bound it needs",
        ),
    ),
    "bench publish": _of(
        ("bench publish --json", "one JSON line last"),
        ("bench publish --shape 1.5B", "one model, in half the time"),
    ),
    "bench engine": _of(("bench engine --quick", "in under 45 s")),
    "bench pipeline": _of(
        ("bench pipeline --json", "one JSON line last"),
        ("bench pipeline --out pipeline --half asynchronous", "where a call lasts minutes"),
    ),
    "bench api": _of(("bench api --quick", "in under 45 s")),
    "bench retriever": _of(("bench retriever --quick", "in under 45 s")),
    "bench rollout": _of(("bench rollout --backend torch --quick", "without vLLM")),
    "bench stability": _of(
        ("bench stability --max-minutes 9", "what nine minutes hold; again for the rest"),
        ("bench stability --quick --json", "whether it runs here, in under 45 s"),
    ),
    "soak": _of(
        ("soak deploy/configs/demo.toml --json", "two hours; one JSON line last"),
        ("soak --judge runs/demo-1/samples.csv", "a soak that is over or under way"),
    ),
    # ---- prepare
    "doctor": _of(
        ("doctor", "this machine"),
        ("doctor --config deploy/configs/demo.toml", "this machine, for that configuration"),
        ("doctor runs/demo-1", "and the live parts of a run: Redis, API, engines, clocks"),
        ("doctor runs/demo-1 --bundle", "collect what somebody who was not there needs to see"),
        ("doctor --deep", "and whether engine and learner give tokens the same log-probs"),
    ),
    "config": _of(
        ("config show deploy/configs/demo.toml", "every key, defaults filled in"),
    ),
    "config show": _of(
        ("config show deploy/configs/demo.toml", "every key, defaults filled in"),
        ("config show --set replay.max_staleness=0 --json", "one JSON line"),
    ),
    "config validate": _of(
        ("config validate deploy/configs/demo.toml", "with the corpus and questions it names"),
    ),
    "config schema": _of(
        ("config schema", "JSON schema, for editors"),
        ("config schema --markdown", "a reference page"),
    ),
    "retriever": _of(
        ("retriever serve bundled --port 8000", "serve the bundled passages"),
    ),
    "retriever index": _of(
        ("retriever index corpus.jsonl --out index", "a BM25 index of a corpus"),
        (
            "retriever index corpus.jsonl --out index --kind dense-flat --encoder e5",
            "a dense one",
        ),
    ),
    "retriever serve": _of(
        ("retriever serve index --port 8000", "serve an index folder over HTTP"),
        ("retriever serve bundled --port 0", "the bundled passages, on a free port"),
    ),
    "export": _of(
        ("export runs/demo-1 model", "the newest checkpoint"),
        ("export runs/demo-1 model --which best --dtype bfloat16", "the best, half the size"),
    ),
    "warmstart": _of(
        ("warmstart --out model --steps 2000 --eval 200", "train it, then judge it"),
        ("warmstart --out model --steps 2000 --dry-run", "check everything, train nothing"),
    ),
}
