import sys
from collections.abc import Iterator

import pytest

from dcp_pipeline.core.registry import register, unregister
from tests.distributed.pool import Pool

_WITH_FAULTS = {"cases", "faults_running", "crash", "manager"}


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of ranks: ``ranks(2).run(function, *args)``."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _kinds_as_users_see_them(request: pytest.FixtureRequest) -> Iterator[None]:
    """``tests.faults`` adds a kind of storage when it is imported; only its own tests see it."""
    faults = sys.modules.get("tests.faults")
    if faults is None or _WITH_FAULTS & set(request.path.parts):
        yield
        return
    unregister("storage", "faulty")
    yield
    register("storage", "faulty", faults.FaultyConfig)
