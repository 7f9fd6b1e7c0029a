"""Where a save runs; the kind of storage that fails is known in every test."""

from collections.abc import Iterator

import pytest

from dcp_pipeline.core.registry import unregister
from tests.background.faults import register_troubled
from tests.background.pipelines import MOSTLY_THREAD


@pytest.fixture(params=MOSTLY_THREAD)
def background(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def troubled() -> Iterator[None]:
    register_troubled()
    yield
    unregister("storage", "troubled")
