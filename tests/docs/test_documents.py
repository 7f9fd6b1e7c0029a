"""Every example in the documents runs, in the order of its document, in one folder.

Python blocks share their names. A block whose first line is a comment with a file name
(``# conf/train.yaml``) is written to that file. Of shell blocks the lines with ``dcp-pipeline`` and
``python`` run; ``make`` and ``torchrun`` lines have to name something that is there.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcp_pipeline.cli.main import main
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core import errors, registry
from dcp_pipeline.graph.drawing import draw
from dcp_pipeline.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "docs/guide.md", "docs/format.md", "docs/operations.md", "docs/design.md"]
DOCUMENTS += ["CONTRIBUTING.md"]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.(?:yaml|py))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and its first line in the document."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        match = _FILE.match(self.text)
        return match[1] if match else None


def blocks_of(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text[: match.start(2)].count("\n") + 1)
        for match in _FENCE.finditer(text)
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_examples_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks_of(document):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            padded = "\n" * (block.line - 1) + block.text
            exec(compile(padded, str(ROOT / document), "exec"), names)
        elif block.language == "sh":
            for line in _commands(block.text):
                _run_line(line)


def _commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def _run_line(words: list[str]) -> None:
    program, *arguments = words
    if program == "dcp-pipeline":
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0, words
    elif program == "python":
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, *arguments], env=environment, check=True)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "torchrun":
        assert any((ROOT / word).is_file() for word in arguments), words
    else:
        assert program in ("git", "pip"), words


def test_every_error_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(\w+)` \|.+\|.*\|$", text, re.MULTILINE)
    tree = [errors.CheckpointError]
    for kind in tree:
        public = (k for k in kind.__subclasses__() if k is vars(errors).get(k.__name__))
        tree += [k for k in public if k not in tree]
    assert sorted(explained) == sorted(k.__name__ for k in tree if not k.__name__.startswith("_"))


def test_the_pictures_are_what_is_built() -> None:
    pictures = [block.text for block in blocks_of("README.md") if block.language == "mermaid"]
    assert pictures == _pictures(), "python -m tests.docs.test_documents draws them anew"


def _pictures() -> list[str]:
    with Pipeline(PipelineConfig()) as pipeline:
        return [draw(graph, "mermaid") for graph in (pipeline.save_graph, pipeline.load_graph)]


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / document).parent / path if path else ROOT / document
        assert linked.is_file(), target
        if anchor:
            assert anchor in _anchors(linked.read_text(encoding="utf-8")), target


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def draw_anew() -> None:
    """Put the graphs as they are now into the README."""
    drawn = iter(_pictures())
    path = ROOT / "README.md"
    text = re.sub(
        r"(?<=^```mermaid\n).*?(?=^```$)",
        lambda match: next(drawn),
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    draw_anew()
