"""``RankLocal`` in a load that fails, and where it is left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcp_pipeline import RankLocal
from tests.state.rank_locals import Loader, Outer, load, save


class Failing:
    fails = False

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("not today")


@pytest.mark.parametrize("place", ["before", "after", "inside"])
@pytest.mark.parametrize("rollback", ["copy", "verify_first", "none"])
def test_a_load_that_fails(tmp_path: Path, place: str, rollback: str) -> None:
    module, loader, failing = nn.Linear(2, 2), Loader(3), Failing()

    def state(value: float) -> dict[str, Any]:
        with torch.no_grad():
            module.weight.fill_(value)
        loader.position = int(value)
        own = RankLocal({
            "module": module, "loader": loader, "list": [torch.full((2,), value), {"v": value}],
            "array": np.full(2, value), "tuple": (torch.full((1,), value), value),
            "nested": Outer(loader=Loader(int(value)), plain=[value]),
            f"only {value}": value,
        })  # fmt: skip
        if place == "inside":
            own.value["failing"] = failing
        result = {"own": own, "replaced": RankLocal(value)}
        return {
            "before": {"failing": failing, **result},
            "after": {**result, "failing": failing},
            "inside": result,
        }[place]

    save(state(2.0), tmp_path)
    template = state(1.0)
    own = template["own"].value
    objects = {name: own[name] for name in own}
    failing.fails = True
    with pytest.raises(RuntimeError, match="not today"):
        load(template, tmp_path, rollback=rollback)
    if rollback == "none":
        return
    assert template["own"].value is own and template["replaced"].value == 1.0
    assert list(own) == list(objects) and all(own[name] is objects[name] for name in own)
    assert module.weight.tolist() == [[1.0, 1.0]] * 2 and loader.position == 1
    assert own["nested"].parts["loader"].position == 1 and own["nested"].parts["plain"] == [1.0]
    assert own["list"][0].tolist() == [1.0, 1.0] and own["list"][1] == {"v": 1.0}
    assert own["array"].tolist() == [1.0, 1.0] and own["tuple"][1] == 1.0
    failing.fails = False
    load(template, tmp_path, rollback=rollback)
    assert module.weight.tolist() == [[2.0, 2.0]] * 2 and loader.position == 2
    assert own["nested"].parts["loader"].position == 2 and own["array"].tolist() == [2.0, 2.0]


def test_an_array_of_an_object_is_put_back(tmp_path: Path) -> None:
    array = np.ones(3)
    failing = Failing()
    state = {"object": Outer(array=array), "failing": failing}
    save(state, tmp_path)
    array[:] = 5
    failing.fails = True
    with pytest.raises(RuntimeError, match="not today"):
        load(state, tmp_path)
    assert array.tolist() == [5.0] * 3


def test_what_is_left_out_stays(tmp_path: Path) -> None:
    save({"own": RankLocal({"at": 3}), "x": 1}, tmp_path)
    own = RankLocal({"at": 1})
    exclude = [{"kind": "exclude", "keys": ["own"], "on": "load"}]
    load({"own": own, "x": 0}, tmp_path, transforms=exclude)
    assert own.value == {"at": 1}


def test_left_out_of_a_save(tmp_path: Path) -> None:
    exclude = [{"kind": "exclude", "keys": ["*.secret"], "on": "save"}]
    save({"own": RankLocal({"at": 3, "secret": 1})}, tmp_path, transforms=exclude)
    own = RankLocal({"at": 1, "secret": 2})
    load({"own": own}, tmp_path)
    assert own.value == {"at": 3}
