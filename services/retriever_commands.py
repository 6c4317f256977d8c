"""`leeway retriever`: build an index, serve it. This file imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leeway.services.arguments import AsJson, DryRunOfWork

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from leeway.actors.search.index_folder import Manifest

retriever_app = typer.Typer(
    help="Build an index over a corpus, and serve it to search agents.", no_args_is_help=True
)

Kind = Literal["bm25", "dense-flat", "dense-hnsw"]
_PLAIN_EVERY: int = 100_000
"""Passages between two lines of progress without a terminal."""


@retriever_app.command("index")
def retriever_index(
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help='JSON lines of {"id", "contents"} (plain, .xz, .zst), .parquet or .arrow; '
            "a folder of the last two.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the index.")],
    kind: Annotated[
        Kind, typer.Option("--kind", help="Words, every vector, or a graph of vectors.")
    ] = "bm25",
    encoder: Annotated[
        Path | None,
        typer.Option("--encoder", metavar="MODEL_DIR", help="Encoder of a dense index."),
    ] = None,
    query_prefix: Annotated[
        str | None,
        typer.Option("--query-prefix", help='Before queries; else "query: " for E5 models.'),
    ] = None,
    passage_prefix: Annotated[
        str | None,
        typer.Option("--passage-prefix", help='Before passages; else "passage: " for E5 models.'),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the index in DIR.")] = False,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Build the index of a corpus in a folder, whole or not at all."""
    import time

    from leeway.actors.search.documents import stream_documents
    from leeway.actors.search.index_folder import build_index, check_target
    from leeway.actors.search.index_source import load_encoder

    _check_encoder(kind, encoder, query_prefix, passage_prefix)
    check_target(out, force)
    model = None if encoder is None else load_encoder(encoder, query_prefix, passage_prefix)
    if dry_run:
        return _tell_index(corpus, out, kind, encoder, as_json)
    documents = (document for _, document in stream_documents(corpus))
    began = time.monotonic()
    with _Shown() as shown:
        manifest = build_index(
            documents, out, kind=kind, encoder=model, force=force, progress=shown.update
        )
    _report(manifest, out, time.monotonic() - began, as_json)


def _tell_index(corpus: Path, out: Path, kind: Kind, encoder: Path | None, as_json: bool) -> None:
    """After reading the corpus through, as the build does."""
    from leeway.actors.search.documents import stream_documents
    from leeway.services.dry_run import Place, Plan, check_writable, found, tell

    check_writable(out, "--out")
    with _Shown() as shown:
        num_passages = num_characters = 0
        for _, document in stream_documents(corpus):
            num_passages += 1
            num_characters += len(document.title) + len(document.text)
            if num_passages % 1000 == 0:
                shown.update("reading", num_passages)
    tell(
        Plan(
            does=f"index {num_passages:,} passages as {kind}",
            reads=[
                found("corpus", corpus),
                *([] if encoder is None else [found("encoder", encoder)]),
            ],
            writes=[Place(what="index", where=str(out))],
            facts={"characters": num_characters},
        ),
        as_json,
    )


def _check_encoder(kind: Kind, encoder: Path | None, *prefixes: str | None) -> None:
    from leeway.replay.errors import ConfigurationError

    if kind == "bm25" and (encoder is not None or any(p is not None for p in prefixes)):
        raise ConfigurationError(
            "--kind bm25 has no encoder and no prefixes; leave them out, or give --kind dense-flat"
        )
    if kind != "bm25":
        from leeway.actors.search.dense import check_installed

        if encoder is None:
            raise ConfigurationError(f"--kind {kind} needs --encoder MODEL_DIR")
        check_installed()


class _Shown:
    """Progress of a build on stderr: a line that changes, or now and then a new one."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next = _PLAIN_EVERY

    def __enter__(self) -> _Shown:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if self._console.is_terminal:
            text = TextColumn("{task.description}  {task.completed:,} passages")
            self._bar = Progress(SpinnerColumn(), text, TimeElapsedColumn(), console=self._console)
            self._task = self._bar.add_task("reading", total=None)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, what: str, num_done: int) -> None:
        """See Progress of index_folder."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=num_done)
        elif num_done >= self._next or what != "reading":
            self._console.print(f"{what}: {num_done:,} passages", highlight=False)
            self._next = num_done + _PLAIN_EVERY


def _report(manifest: Manifest, out: Path, took_s: float, as_json: bool) -> None:
    import msgspec

    if as_json:
        facts = {**msgspec.to_builtins(manifest), "num_bytes": manifest.num_bytes}
        typer.echo(msgspec.json.encode({**facts, "build_s": round(took_s, 3)}).decode())
        return
    typer.echo(
        f"{manifest.num_documents:,} passages, {manifest.kind}, {manifest.num_bytes / 2**20:,.1f} "
        f"MiB in {out} after {took_s:.1f} s; serve it with leeway retriever serve {out}"
    )


@retriever_app.command("serve")
def retriever_serve(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|CORPUS",
            help="Index folder; or a corpus, or `bundled`, indexed by BM25 at the start.",
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.")] = 8000,
    encoder: Annotated[
        Path | None,
        typer.Option("--encoder", metavar="MODEL_DIR", help="Encoder of a dense index, if moved."),
    ] = None,
    top_k: Annotated[
        int, typer.Option("--top-k", min=1, max=100, help="Passages where a request names none.")
    ] = 3,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Queries searched in one go.")
    ] = 64,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=1, help="Queries that may wait; more get 429.")
    ] = 1024,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.001, help="Seconds until a request gets 504.")
    ] = 10.0,
    cache: Annotated[
        int, typer.Option("--cache", min=0, help="Answers kept, the least recent go first.")
    ] = 2048,
    dry_run: DryRunOfWork = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Say where it listens as one JSON line on stdout."),
    ] = False,
) -> None:
    """Serve an index over HTTP under the contract of Search-R1, until SIGTERM or Ctrl-C."""
    import logging

    from leeway.actors.config import SearchConfig, corpus_file
    from leeway.actors.search.index_source import index_at
    from leeway.actors.search.retriever_app import build_app
    from leeway.actors.search.retriever_server import serve
    from leeway.actors.search.service import ServiceLimits

    logging.basicConfig(level=logging.WARNING, format="leeway: %(message)s")
    path = corpus_file(SearchConfig()) if str(source) == "bundled" else source
    index = index_at(path, encoder)
    if dry_run:
        return _tell_serve(path, len(index), index.kind, host, port, as_json)
    limits = ServiceLimits(
        max_batch=max_batch, max_queue=max_queue, timeout_s=timeout_s, max_cached=cache
    )
    serve(
        build_app(index, top_k, limits),
        host,
        port,
        lambda url: _say_where(url, len(index), index.kind, as_json),
    )


def _tell_serve(
    path: Path, num_passages: int, kind: str, host: str, port: int, as_json: bool
) -> None:
    from leeway.services.config_machine import check_listening
    from leeway.services.dry_run import Place, Plan, found, tell

    check_listening(host, port, "--host", "--port")
    tell(
        Plan(
            does=f"serve {num_passages:,} passages, {kind}",
            reads=[found("index", path)],
            writes=[Place(what="address", where=f"http://{host}:{port}/retrieve")],
        ),
        as_json,
    )


def _say_where(url: str, num_documents: int, kind: str, as_json: bool) -> None:
    import json

    if as_json:
        found = {"url": f"{url}/retrieve", "num_documents": num_documents, "kind": kind}
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"{num_documents:,} passages, {kind}, at {url}/retrieve")
