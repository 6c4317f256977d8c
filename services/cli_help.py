"""How `leeway` explains itself: `--help`, and the one sentence for a command line that is wrong.

Plain text with headings, not rich's panels: importing those would take half of the 0.3 s of
processor time that `--help` may take.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException

from leeway.services.cli_examples import EXAMPLES

MAX_WIDTH: Final = 100
"""Columns that a help page takes at most; fewer where the terminal has fewer."""

PANELS: Final[Mapping[str, Sequence[str]]] = {
    "Train": ("train", "rollout", "learn", "serve", "api"),
    "Look": ("status", "timeline", "trajectories", "replay"),
    "Judge": ("eval", "sweep", "bench", "soak"),
    "Prepare": ("doctor", "config", "retriever", "export", "warmstart"),
}
"""The commands of `leeway` by what they are for, in the order of the help page."""

CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH}


def dress(app: typer.Typer) -> None:
    """Give every command and group of an app, however deep, the help pages of this file.

    A group that has a HelpGroup of its own keeps it.
    """
    app.info.cls = HelpGroup
    for command in app.registered_commands:
        command.cls = HelpCommand
    for group in app.registered_groups:
        if not (isinstance(group.cls, type) and issubclass(group.cls, HelpGroup)):
            group.cls = HelpGroup
        if group.typer_instance is not None:
            dress(group.typer_instance)


class HelpCommand(TyperCommand):
    """A command whose help page ends with examples."""

    def get_help_option(self, ctx: Any) -> Any:
        """See _without_pydantic."""
        return _without_pydantic(super().get_help_option(ctx))

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Usage: leeway export [OPTIONS] RUN_DIR OUT"""
        _write_usage(self, ctx, formatter, [])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options."""
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        _write_examples(ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands: `leeway` itself, or `leeway replay`."""

    def get_help_option(self, ctx: Any) -> Any:
        """See _without_pydantic."""
        return _without_pydantic(super().get_help_option(ctx))

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Usage: leeway replay [OPTIONS] COMMAND ..."""
        _write_usage(self, ctx, formatter, ["COMMAND ..."])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The commands, then the options of the group itself."""
        self.format_commands(ctx, formatter)
        _write_parameters(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands, those of `leeway` by panel."""
        width = max(len(name) for name in self.commands)
        for title, names in self._panels():
            rows = [
                (_bold(name.ljust(width)), _first_paragraph(self.commands[name])) for name in names
            ]
            with formatter.section(_bold(title)):
                formatter.write_dl(rows)

    def _panels(self) -> Iterator[tuple[str, list[str]]]:
        left = [name for name, command in self.commands.items() if not command.hidden]
        if "train" in left:
            for title, names in PANELS.items():
                found = [name for name in names if name in left]
                left = [name for name in left if name not in found]
                yield title, found
        if left:
            yield "Commands", left

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        _write_examples(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises a usage error that names the nearest command."""
        name = args[0]
        if name in self.commands or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        close = get_close_matches(name, list(self.commands), n=2)
        remedy = f"did you mean {' or '.join(close)}?" if close else _one_of(self.commands)
        ctx.fail(f"{ctx.command_path} has no command {name}; {remedy}")


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _one_of(commands: Mapping[str, Any]) -> str:
    return f"it has {', '.join(commands)}"


def _without_pydantic(help_option: Any) -> Any:
    """An option that was not given is None, which typer would have pydantic turn into False."""
    if help_option is not None:
        help_option.default = False
    return help_option


# ---- pages


def _write_usage(command: Any, ctx: Any, formatter: Any, after: list[str]) -> None:
    pieces = ["[OPTIONS]"]
    for param in command.get_params(ctx):
        if isinstance(param, TyperArgument):
            name = param.display_name_raw
            pieces.append(name if param.required else f"[{name}]")
    formatter.write_usage(ctx.command_path, " ".join(pieces + after))


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    params = [p for p in command.get_params(ctx) if not getattr(p, "hidden", False)]
    arguments = [_row(p, ctx) for p in params if isinstance(p, TyperArgument)]
    options = [_row(p, ctx) for p in params if not isinstance(p, TyperArgument)]
    for title, rows in (("Arguments", arguments), ("Options", options)):
        if rows:
            with formatter.section(_bold(title)):
                formatter.write_dl(rows)


def _row(param: Any, ctx: Any) -> tuple[str, str]:
    """`--backend vllm|torch`, and its help with the default."""
    if isinstance(param, TyperArgument):
        return _bold(param.display_name_raw), param.help or ""
    shown = _bold(", ".join(sorted(param.opts, key=len)))
    if not getattr(param, "is_flag", True):
        shown += f" {param.metavar or _metavar(param, ctx)}"
    text = param.help or ""
    if param.required:
        text += " Required."
    elif isinstance(param, TyperOption) and _has_default(param):
        text += f" [default: {param.default}]"
    return shown, text


def _metavar(param: TyperOption, ctx: Any) -> str:
    """A choice lists its values; anything else is named by its kind."""
    shown = param.display_type(ctx).strip("<>")
    return shown if "|" in shown else {"int": "N", "float": "X"}.get(shown.split()[0], "TEXT")


def _has_default(param: TyperOption) -> bool:
    return param.default is not None and not param.is_flag and not callable(param.default)


def _write_examples(ctx: Any, formatter: Any) -> None:
    path = " ".join(ctx.command_path.split()[1:])
    examples = EXAMPLES.get(path, ())
    if not examples:
        return
    with formatter.section(_bold("Examples")):
        for example in examples:
            formatter.write_text(_dim(f"# {example.meaning}"))
            # Never wrapped: it is there to be copied.
            formatter.write(f"{'':{formatter.current_indent}}leeway {example.line}\n")


def _is_coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _bold(text: str) -> str:
    return typer.style(text, bold=True) if _is_coloured() else text


def _dim(text: str) -> str:
    return typer.style(text, dim=True) if _is_coloured() else text


# ---- complaints


def usage_sentence(error: TyperException, app: typer.Typer, words: Sequence[str]) -> str:
    """One sentence for a command line that cannot be read, and where to look.

    `leeway train has no option --resme; did you mean --resume? See leeway train --help`
    """
    ctx: Any = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else _path_of(app, words)
    name = getattr(error, "option_name", None)
    possible = getattr(error, "possibilities", None)
    if name is not None and hasattr(error, "possibilities"):
        sentence = f"{path} has no option {name}"
        if possible:
            sentence += f"; did you mean {' or '.join(list(possible)[:2])}?"
    else:
        sentence = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
        sentence = sentence[:1].lower() + sentence[1:]
    end = " See" if sentence.endswith("?") else "; see"
    return f"{sentence}{end} {path} --help"


def _path_of(app: typer.Typer, words: Sequence[str]) -> str:
    """["retriever", "index", "--out"] -> leeway retriever index"""
    command: Any = typer.main.get_command(app)
    path = ["leeway"]
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path.append(word)
    return " ".join(path)
