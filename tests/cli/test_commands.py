import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dcp_pipeline.cli.main import main
from dcp_pipeline.config.compose import compose
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.config.places import recipe_names
from tests.marks import slow

Captured = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_config_shows_yaml_that_can_be_used_again(capsys: Captured, tmp_path: Path) -> None:
    assert run("config", "storage.thread_count=4", "serialization=safetensors") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    expected = compose(["storage.thread_count=4", "serialization=safetensors"]).config
    assert PipelineConfig.model_validate(yaml.safe_load(shown.out)) == expected
    assert shown.out.startswith(f"# digest: {expected.digest()}\nstager:\n  kind: inplace\n")
    (tmp_path / "again.yaml").write_text(shown.out)
    assert run("config", "--recipe", str(tmp_path / "again.yaml")) == 0
    assert capsys.readouterr().out == shown.out


def test_config_of_a_recipe(capsys: Captured) -> None:
    assert run("config", "--recipe", "llama3_8b", "storage.thread_count=6") == 0
    out = capsys.readouterr().out
    assert out.startswith("# recipe: llama3_8b: Llama 3 8B")
    expected = compose(["storage.thread_count=6"], "llama3_8b").config
    assert PipelineConfig.model_validate(yaml.safe_load(out)) == expected


def test_config_as_json(capsys: Captured) -> None:
    assert run("config", "-r", "tiny_decoder", "--json", "rollback=none") == 0
    report = json.loads(capsys.readouterr().out)
    composed = compose(["rollback=none"], "tiny_decoder")
    assert composed.recipe is not None
    assert report == {
        "config": composed.config.to_dict(),
        "digest": composed.config.digest(),
        "recipe": {"name": "tiny_decoder", "description": composed.recipe.description},
    }
    assert run("config", "--json") == 0
    assert json.loads(capsys.readouterr().out)["recipe"] is None


def test_recipes(capsys: Captured) -> None:
    assert run("recipes") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())
    assert run("recipes", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [recipe["name"] for recipe in listed] == list(recipe_names())
    assert all(recipe["description"] for recipe in listed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["config", "storage=memory", "storage.thread_count=4"],
            "error: storage.thread_count: a key of storage=filesystem, which is not chosen; "
            "storage=memory takes no keys (where a recipe sets it, ~storage.thread_count takes it "
            "out)\n",
        ),
        (
            ["config", "storage=tape"],
            "error: storage: found the kind 'tape'; allowed: filesystem, memory\n",
        ),
        (
            ["config", "--recipe", "llama"],
            f"error: found the recipe 'llama'; allowed: {', '.join(recipe_names())}, or the path "
            "of a YAML file; did you mean 'llama3_8b'?\n",
        ),
    ],
)
def test_a_config_error_is_one_message(
    capsys: Captured, arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == message


def test_debug_shows_the_traceback(capsys: Captured) -> None:
    assert run("--debug", "config", "storage=tape") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert "ConfigError: storage: found the kind 'tape'" in err


@pytest.mark.parametrize("arguments", [["nope"], ["config", "--nope"], []])
def test_a_usage_error(capsys: Captured, arguments: list[str]) -> None:
    assert run(*arguments) == 2


def test_the_surface(capsys: Captured) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for command in ("config", "recipes"):
        assert command in out
    assert run("config", "--help") == 0
    out = capsys.readouterr().out
    for option in ("--recipe", "--json", "overrides"):
        assert option in out


TORCH_FREE = [
    "import dcp_pipeline.config.compose",
    "import dcp_pipeline.builder",
    "from dcp_pipeline.builder import PipelineBuilder; PipelineBuilder().config()",
    "from dcp_pipeline.cli.main import app; app(['--help'], standalone_mode=False)",
    "from dcp_pipeline.cli.main import app, _Settings; "
    "app(['config', '-r', 'llama3_8b'], standalone_mode=False, obj=_Settings())",
    "from dcp_pipeline.cli.main import app, _Settings; "
    "app(['recipes'], standalone_mode=False, obj=_Settings())",
    "from dcp_pipeline.cli.main import app, _Settings; "
    "app(['estimate', '-r', 'gpt2'], standalone_mode=False, obj=_Settings())",
    "from dcp_pipeline.cli.main import app, _Settings; "
    "app(['rules', 'check', '-r', 'qwen3_8b'], standalone_mode=False, obj=_Settings())",
]


@pytest.mark.parametrize("program", TORCH_FREE)
def test_torch_stays_out(program: str) -> None:
    check = "import sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{check}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def ended(*command: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [slow(["recipes", "--json"], 0), (["ls", "/nowhere"], 1), slow(["--help"], 0)],
    ids=str,
)
def test_the_package_runs_as_a_module(arguments: list[str], code: int) -> None:
    by_module = ended("-m", "dcp_pipeline", *arguments)
    assert by_module == ended("-m", "dcp_pipeline.cli.main", *arguments)
    assert by_module[0] == code


def test_the_package_runs_as_a_module_without_torch() -> None:
    free = (
        "import runpy, sys\nsys.argv[1:] = ['recipes']\n"
        "try:\n    runpy.run_module('dcp_pipeline', run_name='__main__')\n"
        "except SystemExit as exit:\n    assert not exit.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    assert ended("-c", free)[0] == 0
