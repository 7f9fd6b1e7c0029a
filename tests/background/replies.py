"""What a background process answers in the tests."""

import os
import time
from typing import Any


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("it cannot travel")


class Replies:
    def __init__(self, name: str | None) -> None:
        if name is None:
            raise ValueError("it needs a name")
        self._name = name

    def __call__(self, request: Any, descriptor: int) -> Any:
        if request == "name":
            return self._name
        if request == "exit":
            os._exit(17)
        if request == "sleep":
            time.sleep(30)
        if request == "unpicklable error":
            raise Unpicklable
        if request == "read":
            data = os.read(descriptor, 100)
            os.close(descriptor)
            return data
        raise ValueError("no such question")
