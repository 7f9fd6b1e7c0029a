"""What the command line promises: a change here is a change for everybody's scripts."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
import typer.main

from dcp_pipeline.cli.main import app
from dcp_pipeline.pipeline import Pipeline

SURFACE = {
    "config": ["--help", "--json", "--recipe", "-r", "overrides"],
    "recipes": ["--help", "--json", "recipe"],
    "estimate": ["--help", "--json", "--ranks", "--recipe", "-r", "overrides"],
    "rules check": [
        "--help",
        "--json",
        "--map",
        "--prefix",
        "--recipe",
        "--reverse",
        "-m",
        "-r",
        "arguments",
    ],
    "graph": [
        "--format",
        "--help",
        "--json",
        "--output",
        "--recipe",
        "-f",
        "-o",
        "-r",
        "arguments",
    ],
    "inspect": ["--files", "--help", "--json", "--keys", "path"],
    "ls": ["--help", "--json", "path"],
    "latest": ["--help", "--json", "root"],
    "verify": ["--help", "--json", "--threads", "path"],
    "diff": [
        "--atol",
        "--drop",
        "--help",
        "--json",
        "--memory",
        "--only",
        "--rtol",
        "--threads",
        "a",
        "b",
    ],
    "convert": [
        "--average",
        "--dequantize",
        "--drop",
        "--dtype",
        "--from",
        "--help",
        "--json",
        "--max-shard-size",
        "--memory",
        "--no-check",
        "--no-resume",
        "--only",
        "--plan-only",
        "--recipe",
        "--reverse",
        "--to",
        "--weights",
        "-r",
        "overrides",
        "source",
        "target",
    ],
    "prune": ["--dry-run", "--help", "--json", "root"],
}


def test_commands_and_options_are_frozen() -> None:
    assert {name: _options(command) for name, command in _commands().items()} == SURFACE


def _commands() -> dict[str, click.Command]:
    """All of them by name; those of a group by the group's name and theirs."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        if hasattr(command, "commands"):
            found |= {f"{name} {below}": one for below, one in command.commands.items()}
        else:
            found[name] = command
    return found


def _options(command: click.Command) -> list[str]:
    context = click.Context(command)
    return sorted(
        name
        for parameter in command.get_params(context)
        for name in (parameter.opts if parameter.param_type_name == "option" else [parameter.name])
    )


@pytest.mark.parametrize("command", SURFACE)
def test_help_says_what_a_command_is_for(command: str) -> None:
    assert _commands()[command].help


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_our_checkpoints_are_looked_at_without_torch(tmp_path: Path, serialization: str) -> None:
    with Pipeline.from_recipe("tiny_decoder", [f"serialization={serialization}"]) as pipeline:
        pipeline.save({"w": torch.ones(4)}, tmp_path / "step-1")
    commands = [
        ["inspect", str(tmp_path / "step-1"), "--files"],
        ["inspect", str(tmp_path / "step-1"), "--json"],
        ["ls", str(tmp_path)],
        ["latest", str(tmp_path)],
        ["ls", str(tmp_path / "step-1"), "--json"],
        *([["verify", str(tmp_path)]] if serialization == "safetensors" else []),
    ]
    program = (
        "import sys\nfrom dcp_pipeline.cli.main import main\n"
        f"for arguments in {commands!r}:\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as exit:\n        assert not exit.code, arguments\n"
        "    assert 'torch' not in sys.modules, f'torch was imported: {arguments}'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
