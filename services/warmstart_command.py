"""`leeway warmstart`: the bundled policy, made anew. Importing this file imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from leeway.services.arguments import AsJson, DryRunOfWork

Device = Literal["auto", "cpu", "cuda"]
Mix = Literal["careless", "careful"]


class Options(NamedTuple):
    """What is asked for; each as in the command below."""

    out: Path
    steps: int
    batch: int
    seed: int
    init: Path | None
    learning_rate: float
    real_share: float
    device: Device
    mix: Mix
    care: str
    save_every: int
    threads: int
    workers: int
    eval: int
    dry_run: bool
    json: bool


def warmstart(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Model folder to write or judge.")],
    steps: Annotated[
        int, typer.Option(min=0, help="Steps to train; 0 only judges the folder.")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Episodes of a step.")] = 256,
    seed: Annotated[int, typer.Option(help="Of weights, episodes and samples.")] = 0,
    init: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Model folder to go on from; else fresh weights."),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(min=0, metavar="RATE", help="Peak of the schedule.")
    ] = 1e-3,
    real_share: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="Share of real training questions."),
    ] = 0.1,
    device: Annotated[Device, typer.Option(help="Where to train and judge.")] = "auto",
    mix: Annotated[Mix, typer.Option(help="The demonstrator that is imitated.")] = "careless",
    care: Annotated[
        str,
        typer.Option(
            metavar="CHANGES",
            help="Changes to the mix: early_stop=0.7,no_search=0.1.",
            show_default=False,
        ),
    ] = "",
    save_every: Annotated[
        int, typer.Option(min=0, help="Also keep DIR-step-N, and judge it; 0 does not.")
    ] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="Processor threads of torch; 0 leaves it to torch.")
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that make episodes; 0: one for each core.")
    ] = 0,
    num_questions: Annotated[
        int, typer.Option("--eval", min=0, help="Held-out questions to judge with.")
    ] = 0,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Train the bundled policy anew, supervised on scripted episodes."""
    from leeway.services.processes.warmstart import make_policy

    make_policy(
        Options(
            out=out,
            steps=steps,
            batch=batch,
            seed=seed,
            init=init,
            learning_rate=learning_rate,
            real_share=real_share,
            device=device,
            mix=mix,
            care=care,
            save_every=save_every,
            threads=threads,
            workers=workers,
            eval=num_questions,
            dry_run=dry_run,
            json=as_json,
        )
    )
