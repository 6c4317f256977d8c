"""`leeway export`: a run's policy as a Hugging Face folder. Importing this file imports nothing
heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leeway.replay.errors import ConfigurationError
from leeway.services.arguments import AsJson, DryRunOfWork
from leeway.services.completion import run_directories

if TYPE_CHECKING:
    from leeway.learner.checkpoint import Checkpoint

Which = Literal["last", "best"]
Dtype = Literal["float32", "bfloat16"]


def export(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="Run directory.", autocompletion=run_directories),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make.", metavar="OUT")],
    which: Annotated[
        Which,
        typer.Option(help="Checkpoint: the newest, or the one with the highest mean reward."),
    ] = "last",
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights that are written; training keeps float32.")
    ] = "float32",
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's policy as a folder that transformers and vLLM load."""
    if dry_run:
        return _tell(run_dir, out, which, dtype, as_json)
    version = export_policy(run_dir, out, which, dtype)
    if as_json:
        import json

        written = {"version": version, "folder": str(out), "which": which, "dtype": dtype}
        typer.echo(json.dumps(written))
    else:
        typer.echo(f"policy version {version} is in {out}")


def export_policy(run_dir: Path, out: Path, which: Which, dtype: Dtype) -> int:
    """Returns the version. Raises ConfigurationError for a run without such a checkpoint, and for
    an `out` that exists and is not empty."""
    from leeway.services.results import export_model

    found = _chosen(run_dir, out, which)
    out.parent.mkdir(parents=True, exist_ok=True)
    export_model(found.path, out)
    if dtype != "float32":
        _round(out, dtype)
    return found.version


def _chosen(run_dir: Path, out: Path, which: Which) -> Checkpoint:
    from leeway.learner.checkpoint import best, latest
    from leeway.services.layout import open_run

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} exists; name a folder that does not, or an empty one")
    found = (latest if which == "last" else best)(open_run(run_dir).checkpoints)
    if found is None:
        raise ConfigurationError(
            f"{run_dir} holds no complete checkpoint yet; learner.checkpoint_every says how often "
            "one is written"
        )
    return found


def _tell(run_dir: Path, out: Path, which: Which, dtype: Dtype, as_json: bool) -> None:
    from leeway.services.dry_run import Place, Plan, check_room, check_writable, tell

    found = _chosen(run_dir, out, which)
    check_writable(out, "OUT")
    files = [f for f in found.path.iterdir() if f.is_file() and f.name != "training.json"]
    full = sum(f.stat().st_size for f in files)
    weights = sum(f.stat().st_size for f in files if f.suffix == ".safetensors")
    written = full if dtype == "float32" else full - weights + weights // 2
    check_room(out, full)
    tell(
        Plan(
            does=f"write policy version {found.version} in {dtype}",
            reads=[Place(what="checkpoint", where=str(found.path), num_bytes=full)],
            writes=[Place(what="model", where=str(out), num_bytes=written)],
        ),
        as_json,
    )


def _round(folder: Path, dtype: Dtype) -> None:
    from leeway.learner.model import round_weights

    round_weights(folder, dtype)
