"""Configs of the serializations, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from dcp_pipeline.core.kind import KindConfig, Names

if TYPE_CHECKING:
    from dcp_pipeline.serialization.safetensors import SafetensorsSerialization
    from dcp_pipeline.serialization.torch_save import TorchSaveSerialization

__all__ = ["SafetensorsConfig", "TorchSaveConfig"]


def _dotted(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        parts = name.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise ValueError(f"{name!r} is no dotted name such as 'my_package.Thing'")
    return names


class TorchSaveConfig(KindConfig):
    """Items in ``torch.save``'s format, which plain DCP reads too.

    Attributes:
        trusted: lift the guard of ``weights_only=True``. Loading can then run any code that the
            file names: only for files whose writer you trust as you trust your own program.
        safe_globals: dotted names of classes that byte items may hold beside torch's own.
    """

    kind: Literal["torch_save"] = "torch_save"
    trusted: bool = False
    safe_globals: Annotated[Names, AfterValidator(_dotted)] = ()

    def build(self) -> TorchSaveSerialization:
        """Make the serialization."""
        from dcp_pipeline.serialization.torch_save import TorchSaveSerialization

        return TorchSaveSerialization(trusted=self.trusted, safe_globals=self.safe_globals)


class SafetensorsConfig(KindConfig):
    """Every data file is a safetensors file, and nothing is pickled anywhere."""

    kind: Literal["safetensors"] = "safetensors"

    def build(self) -> SafetensorsSerialization:
        """Make the serialization."""
        from dcp_pipeline.serialization.safetensors import SafetensorsSerialization

        return SafetensorsSerialization()
