import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from dcp_pipeline.config.compose import compose, load_mapping
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.core.registry import kinds, model_of, register, unregister
from dcp_pipeline.storage.config import FileSystemConfig

MODULE = """\
from typing import Literal
from dcp_pipeline.core.kind import KindConfig

class TapeConfig(KindConfig):
    kind: Literal["tape"] = "tape"
    drive: int = 0

    def build(self):
        return f"tape drive {self.drive}"

NOT_A_MODEL = 3
"""


class TapeConfig(KindConfig):
    kind: Literal["tape"] = "tape"
    drive: int = 0

    def build(self) -> str:
        return f"tape drive {self.drive}"


class Distribution:
    """An installed package with entry points."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.module = f"tape_{folder.name}"

    def provides(self, kind: str, target: str = "TapeConfig", name: str = "tape") -> None:
        (self.folder / f"{self.module}.py").write_text(MODULE)
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[dcp_pipeline.storage]\n{kind} = {self.module}:{target}\n"
        )

    def install(self) -> None:
        self.patch.syspath_prepend(str(self.folder))


@pytest.fixture
def distribution(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Distribution:
    return Distribution(tmp_path_factory.mktemp("dist"), monkeypatch)


@pytest.fixture
def tape() -> Iterator[None]:
    register("storage", "tape", TapeConfig)
    yield
    unregister("storage", "tape")


@pytest.mark.usefixtures("tape")
def test_a_registered_kind() -> None:
    assert kinds("storage") == ("filesystem", "memory", "tape")
    assert model_of("storage", "tape") is TapeConfig
    config = load_mapping({"storage": {"kind": "tape", "drive": 3}})
    assert config.storage.build() == "tape drive 3"
    assert load_mapping(config.to_dict()) == config
    assert load_mapping({"storage": TapeConfig(drive=3)}) == config
    assert compose(["storage=tape", "storage.drive=3"]).config == config


@pytest.mark.usefixtures("tape")
def test_its_fields_are_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["storage=tape", "storage.driv=3"])
    assert str(caught.value) == (
        "storage.driv: unknown key; storage=tape takes the keys drive; did you mean 'drive'?"
    )


def test_the_kind_is_gone_when_it_is_taken_back() -> None:
    register("storage", "tape", TapeConfig)
    unregister("storage", "tape")
    with pytest.raises(ConfigError, match="found the kind 'tape'; allowed: filesystem, memory"):
        model_of("storage", "tape")


@pytest.mark.usefixtures("tape")
def test_registering_twice() -> None:
    register("storage", "tape", TapeConfig)
    with pytest.raises(ConfigError, match="'tape' is already registered, as TapeConfig"):
        register("storage", "tape", FileSystemConfig)


def test_a_built_in_name_is_taken() -> None:
    with pytest.raises(ConfigError, match="storage kind 'memory' is built in"):
        register("storage", "memory", TapeConfig)


def test_an_unknown_group() -> None:
    with pytest.raises(ConfigError, match="found the group 'storages'; allowed: stager, planner"):
        register("storages", "tape", TapeConfig)


def test_what_is_no_model() -> None:
    with pytest.raises(ConfigError, match="must be a subclass of dcp_pipeline"):
        register("storage", "tape", dict)  # type: ignore[arg-type]


def test_an_entry_point_loads_when_its_kind_is_asked_for(distribution: Distribution) -> None:
    distribution.provides("tape")
    distribution.install()
    assert kinds("storage") == ("filesystem", "memory", "tape")
    assert compose().config.storage.kind == "filesystem"
    assert distribution.module not in sys.modules
    config = compose(["storage=tape", "storage.drive=2"]).config
    assert config.storage.build() == "tape drive 2"
    assert distribution.module in sys.modules


def test_an_entry_point_with_a_built_in_name(distribution: Distribution) -> None:
    distribution.provides("memory")
    distribution.install()
    with pytest.raises(ConfigError) as caught:
        load_mapping({"storage": "memory"})
    assert str(caught.value) == (
        "storage: storage kind 'memory' is built in, and tape 1.0 provides it too; "
        "that package must give its kind another name"
    )
    assert load_mapping({}).storage.kind == "filesystem"


def test_two_entry_points_of_one_name(distribution: Distribution) -> None:
    distribution.provides("tape")
    distribution.provides("tape", "Other", name="cassette")
    distribution.install()
    with pytest.raises(ConfigError, match=r"'tape' is provided twice: by \w+ 1\.0 and \w+ 1\.0"):
        model_of("storage", "tape")


def test_registering_what_an_entry_point_provides(distribution: Distribution) -> None:
    distribution.provides("tape")
    distribution.install()
    with pytest.raises(ConfigError, match=r"'tape' is already provided by tape 1\.0"):
        register("storage", "tape", TapeConfig)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Nope", r"'tape' of tape 1.0 does not load: AttributeError: .*Nope"),
        ("NOT_A_MODEL", r"'tape' must be a subclass .* found 3"),
    ],
)
def test_an_entry_point_that_does_not_work(
    distribution: Distribution, target: str, message: str
) -> None:
    distribution.provides("tape", target)
    distribution.install()
    with pytest.raises(ConfigError, match=message):
        compose(["storage=tape"])
