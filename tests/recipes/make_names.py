"""Write ``names/*.json``: what transformers' save_pretrained writes for each shrunken model.

    python -m tests.recipes.make_names

Run it with the version of transformers of the extra ``ecosystem``. The vision model of Llama 4 is
left out, as its recipe leaves it out.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.recipes.shrunken import SHRUNKEN, transformers_model

NAMES = Path(__file__).parent / "names"

_OTHERS = ("vision_model.", "multi_modal_projector.")


def saved(model: Any) -> dict[str, list[int]]:
    """Names and shapes in the files that ``model.save_pretrained`` writes."""
    from safetensors import safe_open

    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for path in Path(folder).glob("*.safetensors"):
            with safe_open(str(path), "pt") as file:
                found |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    return {name: found[name] for name in sorted(found) if not name.startswith(_OTHERS)}


if __name__ == "__main__":
    NAMES.mkdir(exist_ok=True)
    for name in SHRUNKEN:
        lines = [
            f"  {json.dumps(k)}: {json.dumps(v)}"
            for k, v in saved(transformers_model(name)).items()
        ]
        (NAMES / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
