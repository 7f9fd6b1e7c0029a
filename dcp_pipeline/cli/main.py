"""The command `dcp-pipeline`: its commands, its exit codes, and how it reports an error.

Exit codes: 0 well, 1 a problem was found, 2 a usage or config error.

Each command is a module of this folder with a function ``command``; it is listed in `_COMMANDS`.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from dcp_pipeline.cli import (
    config,
    convert,
    diff,
    estimate,
    graph,
    inspect,
    latest,
    ls,
    prune,
    recipes,
    rules,
    verify,
)
from dcp_pipeline.core.errors import CheckpointError, ConfigError

__all__ = ["PROBLEM", "USAGE", "app", "main"]

PROBLEM = 1
"""Exit code when a problem was found."""

USAGE = 2
"""Exit code of a usage or config error."""

_COMMANDS: dict[str, Callable[..., None]] = {
    "config": config.command,
    "recipes": recipes.command,
    "estimate": estimate.command,
    "graph": graph.command,
    "inspect": inspect.command,
    "ls": ls.command,
    "latest": latest.command,
    "verify": verify.command,
    "diff": diff.command,
    "prune": prune.command,
    "convert": convert.command,
}

app = typer.Typer(
    name="dcp-pipeline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(rules.app, name="rules")


@dataclass(slots=True)
class _Settings:
    debug: bool = False


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Distributed checkpoints of PyTorch training, from one config."""
    context.obj.debug = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit, with one clear message where something is wrong.

    Args:
        arguments: without the program's name; ``sys.argv`` by default.
    """
    settings = _Settings()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a key's name is no reason not to show the rest.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=arguments, prog_name="dcp-pipeline", obj=settings)
    except CheckpointError as error:
        if settings.debug:
            traceback.print_exc()
        else:
            typer.secho(f"error: {error}", err=True)
        sys.exit(USAGE if isinstance(error, ConfigError) else PROBLEM)


if __name__ == "__main__":
    main()
