"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AsJson", "Overrides", "Recipe"]

Recipe = Annotated[
    str | None,
    typer.Option("--recipe", "-r", help="Name of a recipe, or path of a YAML file."),
]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Hydra overrides: serialization=safetensors storage.thread_count=4",
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
