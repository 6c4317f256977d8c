"""`leeway eval`: the command. This file imports nothing heavy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leeway.services.arguments import AsJson, DryRunOfWork, File, Overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leeway.services.config import RunConfig
    from leeway.services.evaluation.benchmarks import Benchmark
    from leeway.services.evaluation.run import Plan
    from leeway.services.evaluation.settings import Settings

SAMPLES = "samples"
PARENT = Path("evals")


def evaluate(
    file: File = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|FILE|samples",
            help="Folder of benchmarks (nq/test.jsonl, ...), or one file of all; "
            "or samples made from the bundled questions.",
        ),
    ] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="These alone; else all that are there."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Hugging Face folder, or bundled.")
    ] = None,
    retriever: Annotated[
        str | None, typer.Option(metavar="URL", help="A Search-R1 style server.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(metavar="FILE", help="Passages to search, or bundled.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder of leeway retriever index.")
    ] = None,
    backend: Annotated[
        Literal["vllm", "torch"] | None, typer.Option(help="The engine that samples.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes of each question at temperature 1; else one, greedy."),
    ] = None,
    pass_k: Annotated[
        str | None,
        typer.Option(metavar="K,K", help="Chances that one of K samples is right: 1,4."),
    ] = None,
    num_questions: Annotated[
        int | None, typer.Option(min=1, help="Most questions of each benchmark, chosen by --seed.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the choice of questions and of sampling.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the results; else evals/ and a name of its settings."
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option(min=1, help="Times a failed episode is played in all.")
    ] = 3,
    max_error_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of questions that may fail to be played.")
    ] = 0.05,
    overrides: Overrides = None,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Score a model on question answering benchmarks; the same command goes on where it stopped."""
    from rich.console import Console

    from leeway.services.evaluation.run import Plan, run

    given = {"model": _found(model), "policy.backend": backend, "seed": seed}
    given |= _searched(retriever, corpus, index)
    config = _configuration(file, given, overrides or ())
    ks = _pass_ks(pass_k, samples)
    loaded = _load(data, benchmarks, num_questions, config.seed, dry_run)
    settings = _settings(config, loaded, samples)
    from leeway.services.evaluation.results import show
    from leeway.services.evaluation.settings import FAILURES_FILE, RESULTS_FILE, folder_name

    plan = Plan(
        config=config,
        settings=settings,
        benchmarks=loaded,
        folder=out if out is not None else PARENT / folder_name(settings),
        pass_k=ks,
        num_attempts=attempts,
        max_error_share=max_error_share,
    )
    if dry_run:
        return _tell(plan, as_json)
    results = run(plan, Console(stderr=True, highlight=False))
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(results).decode())
        return
    show(results, Console(highlight=False))
    typer.echo(
        f"results   {plan.folder / RESULTS_FILE}\n"
        f"failures  {plan.folder / FAILURES_FILE}   (open it in a browser)\n"
        f"next      leeway trajectories show {plan.folder}"
    )


def _configuration(
    file: Path | None, given: dict[str, str | int | None], overrides: Sequence[str]
) -> RunConfig:
    """The file, what the options set in it, and what --set sets after them."""
    from leeway.services.config import load

    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load(file, [*options, *overrides])


def _searched(
    retriever: str | None, corpus: str | None, index: str | None
) -> dict[str, str | int | None]:
    """What is searched, in place of whatever the file names."""
    from leeway.replay.errors import ConfigurationError

    given = [
        name
        for name, value in (("retriever", retriever), ("corpus", corpus), ("index", index))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigurationError(
            f"--{given[0]} and --{given[1]} both say what is searched; give one of them"
        )
    if not given:
        return {}
    return {
        "search.retriever_url": retriever or "none",
        "search.index": _found(index) or "none",
        "search.encoder": None if index else "none",
        "search.corpus": _found(corpus) or "bundled",
    }


def _found(path: str | None) -> str | None:
    """A path of the command line is one of the working directory, not of FILE's folder."""
    if path is None or not Path(path).expanduser().exists():
        return path
    return str(Path(path).expanduser().resolve())


def _pass_ks(text: str | None, samples: int | None) -> tuple[int, ...]:
    """`1,4` -> (1, 4). Without --pass-k: none when greedy, 1 and all of the samples otherwise."""
    from leeway.replay.errors import ConfigurationError

    if text is None:
        return () if samples is None else tuple(sorted({1, samples}))
    if samples is None:
        raise ConfigurationError("--pass-k is about several samples; add --samples N")
    try:
        ks = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigurationError(
            f"--pass-k {text} is no list of numbers; write it like 1,4"
        ) from None
    if not 1 <= ks[0] <= ks[-1] <= samples:
        raise ConfigurationError(
            f"--pass-k {text} must lie between 1 and --samples {samples}; raise --samples"
        )
    return ks


def _load(
    data: str | None, names: str | None, num_questions: int | None, seed: int, dry_run: bool
) -> list[Benchmark]:
    """With `dry_run` the samples are made in a folder that goes away again."""
    import tempfile

    from leeway.replay.errors import ConfigurationError
    from leeway.services.evaluation.benchmarks import load_benchmarks

    if data is None:
        raise ConfigurationError(
            "say what to play with --data: a folder of benchmarks, such as nq/test.jsonl in it, or"
            " samples to try the command"
        )
    chosen = None
    if names is not None:
        chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        if not chosen:
            raise ConfigurationError("--benchmarks names none; write it like nq,hotpotqa")
    if data != SAMPLES:
        return load_benchmarks(Path(data), chosen, num_questions, seed)
    from leeway.services.evaluation.samples import write_samples

    if dry_run:
        with tempfile.TemporaryDirectory(prefix="leeway-") as scratch:
            write_samples(Path(scratch))
            return load_benchmarks(Path(scratch), chosen, num_questions, seed)
    folder = PARENT / SAMPLES
    write_samples(folder)
    print(f"samples of all benchmarks are in {folder}", file=sys.stderr)
    return load_benchmarks(folder, chosen, num_questions, seed)


def _tell(plan: Plan, as_json: bool) -> None:
    """What is left to play, after the checks of a run."""
    from leeway.actors.config import model_dir
    from leeway.services.config_machine import check_packages
    from leeway.services.dry_run import Place, check_writable, found, tell
    from leeway.services.dry_run import Plan as Told
    from leeway.services.evaluation.run import left_of

    check_packages(plan.config)
    check_writable(plan.folder, "--out")
    num_left, num_played = left_of(plan)
    samples = plan.settings.num_samples
    tell(
        Told(
            does=f"play {num_left:,} questions of {len(plan.benchmarks)} benchmarks, "
            f"{plan.settings.decoding}, with the {plan.settings.backend} policy",
            reads=[
                found("policy", model_dir(plan.config.model)),
                Place(what="passages", where=plan.settings.retriever),
            ],
            writes=[Place(what="results", where=str(plan.folder))],
            facts={
                "episodes": num_left * samples,
                "questions played before": num_played,
                **{f"questions of {b.name}": len(b.questions) for b in plan.benchmarks},
            },
        ),
        as_json,
    )


def _settings(config: RunConfig, benchmarks: Sequence[Benchmark], samples: int | None) -> Settings:
    from leeway.services.evaluation.settings import settings_of

    return settings_of(config, benchmarks, samples)
