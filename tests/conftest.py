from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of ranks: ``ranks(2).run(function, *args)``."""
    pool = Pool()
    yield pool
    pool.close()
