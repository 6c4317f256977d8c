"""`leeway bench`: one command for each bench. Importing this file imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

bench_app = typer.Typer(
    help="Measure Leeway against the plain way to do the same, in one run.", no_args_is_help=True
)

JsonLast = Annotated[
    bool, typer.Option("--json", help="One JSON line on stdout; the table on stderr.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Smaller shapes and fewer repeats.")]


@bench_app.command("objective")
def bench_objective(as_json: JsonLast = False, quick: Quick = False) -> None:
    """The objective over packed turns, against a loop over padded ones."""
    from leeway.services.bench.objective import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("logprob")
def bench_logprob(as_json: JsonLast = False, quick: Quick = False) -> None:
    """Log-probs and their gradient at a vocabulary of 152k, against whole logits."""
    from leeway.services.bench.logprob import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("ctn")
def bench_ctn(as_json: JsonLast = False, quick: Quick = False) -> None:
    """A step with clipping-triggered normalization, against one without."""
    from leeway.services.bench.ctn import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("learner")
def bench_learner(as_json: JsonLast = False, quick: Quick = False) -> None:
    """A learner's step on 1.5 billion parameters (a few on a CPU), against the machine's peak."""
    from leeway.services.bench.learner import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("decode")
def bench_decode(as_json: JsonLast = False, quick: Quick = False) -> None:
    """Sampling by the torch policy, against generate of transformers."""
    from leeway.services.bench.decode import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("replay")
def bench_replay(as_json: JsonLast = False, quick: Quick = False) -> None:
    """The replay buffer, against plain Redis with the same bytes and a stream of pickles."""
    from leeway.services.bench.replay import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("lookahead")
def bench_lookahead(
    as_json: JsonLast = False,
    quick: Quick = False,
    groups: Annotated[int | None, typer.Option(help="Groups of a step.")] = None,
    in_flight: Annotated[
        int | None, typer.Option(help="Groups that rollout workers play at once.")
    ] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of a learner's step.")] = None,
    play_s: Annotated[float | None, typer.Option(help="Mean seconds to play a group.")] = None,
    spread: Annotated[
        float | None, typer.Option(help="Standard deviation of their logarithm.")
    ] = None,
    max_staleness: Annotated[
        list[int] | None, typer.Option(help="A bound to try. May be given often.")
    ] = None,
) -> None:
    """What a bound on staleness costs, and an adaptive lookahead against a full one; simulated."""
    from leeway.services.bench.lookahead import Load, of_options, run
    from leeway.services.bench.report import show

    load = of_options(
        Load("as given"),
        groups_per_step=groups,
        in_flight=in_flight,
        step_s=step_s,
        play_s=play_s,
        spread=spread,
    )
    show(run(quick=quick, load=load, bounds=tuple(max_staleness or ())), as_json=as_json)


@bench_app.command("publish")
def bench_publish(
    as_json: JsonLast = False,
    quick: Quick = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Size of the model: 0.01B, 1.5B or 7B. May be given often."),
    ] = None,
    transport: Annotated[
        str, typer.Option(help="As learner.transport: auto, direct or collective.")
    ] = "auto",
    staging: Annotated[
        str, typer.Option(help="As policy.staging: auto, always or never; with two GPUs.")
    ] = "auto",
) -> None:
    """New weights for a running engine, against a device-local copy, NCCL alone and vLLM's own."""
    from leeway.services.bench.publish import run
    from leeway.services.bench.report import show

    found = run(quick=quick, shapes=tuple(shape or ()), transport=transport, staging=staging)
    show(found, as_json=as_json)


@bench_app.command("engine")
def bench_engine(as_json: JsonLast = False, quick: Quick = False) -> None:
    """An engine's tokens with log-probs as rollouts get them, against vLLM's own way."""
    from leeway.services.bench.engine import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("pipeline")
def bench_pipeline(
    as_json: JsonLast = False,
    quick: Quick = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for both runs; a temporary one if not given.")
    ] = None,
    half: Annotated[
        Literal["asynchronous", "synchronous"] | None,
        typer.Option(help="Play this run alone; a later call with the same --out compares."),
    ] = None,
) -> None:
    """The whole loop asynchronously, against the same work in lockstep."""
    from leeway.services.bench.pipeline import run
    from leeway.services.bench.report import show

    show(run(quick=quick, out=out, half=half), as_json=as_json)


@bench_app.command("retriever")
def bench_retriever(as_json: JsonLast = False, quick: Quick = False) -> None:
    """BM25 over a million passages, 16 requests in flight, against bm25s' own search."""
    from leeway.services.bench.report import show
    from leeway.services.bench.retriever import run

    show(run(quick=quick), as_json=as_json)


@bench_app.command("api")
def bench_api(as_json: JsonLast = False, quick: Quick = False) -> None:
    """The REST API under 200 requests/s and 500 listeners, and what it costs a training loop."""
    from leeway.services.bench.api import run
    from leeway.services.bench.report import show

    show(run(quick=quick), as_json=as_json)


@bench_app.command("rollout")
def bench_rollout(
    as_json: JsonLast = False,
    quick: Quick = False,
    backend: Annotated[
        Literal["auto", "vllm", "torch"],
        typer.Option(help="Engine. auto: vllm where it is installed, torch with --quick."),
    ] = "auto",
) -> None:
    """The rollout worker by itself, and on an engine against that engine alone."""
    from leeway.services.bench.report import show
    from leeway.services.bench.rollout import run

    show(run(quick=quick, backend=backend), as_json=as_json)


@bench_app.command("stability")
def bench_stability(
    as_json: JsonLast = False,
    quick: Quick = False,
    file: Annotated[
        Path, typer.Option("--file", metavar="FILE", help="TOML file of the sweep.")
    ] = Path("deploy/configs/sweep-lags.toml"),
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Its folder; runs/sweeps/NAME, with --quick a temporary."
        ),
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option("--max-minutes", min=0.01, help="End then; the same command goes on later."),
    ] = None,
) -> None:
    """Four objectives on data 0, 4 and 16 versions old: what they learn, clip and normalise."""
    from leeway.services.bench.report import show
    from leeway.services.bench.stability import run

    show(run(quick=quick, file=file, out=out, max_minutes=max_minutes), as_json=as_json)
