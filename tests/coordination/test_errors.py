import builtins
import errno
import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from dcp_pipeline.coordination.errors import error_from_record, error_to_record
from dcp_pipeline.coordination.exchange import decide, open_answer, wrap_message
from dcp_pipeline.core import errors
from dcp_pipeline.core.errors import CheckpointError, MissingKeyError, RemoteError, StorageError
from dcp_pipeline.types.exceptions import CheckpointException

OURS = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]
BUILT_IN = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
]


def travelled(error: BaseException) -> BaseException:
    return error_from_record(json.loads(json.dumps(error_to_record(error))))[0]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_of_ours_travels(kind: type[CheckpointError]) -> None:
    error = kind("a sentence")
    again = travelled(error)
    assert type(again) is kind and str(again) == "a sentence"
    assert vars(again) == vars(error)
    for name in ("errno", "filename"):
        assert getattr(again, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
def test_every_built_in_error_travels_or_arrives_as_a_remote_error(kind: type[Exception]) -> None:
    try:
        error = kind("a sentence")
    except TypeError:
        pytest.skip("cannot be made of a sentence")
    again = travelled(error)
    assert type(again) in (kind, RemoteError)
    assert "a sentence" in str(again)


@pytest.mark.parametrize("args", [(), ("key",), (3,), (None,), ("a", "b"), ((1, 2),)])
def test_key_errors_are_not_quoted_twice(args: tuple[Any, ...]) -> None:
    again = travelled(KeyError(*args))
    assert type(again) is KeyError and '"' not in str(again)


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize(
    "error",
    [
        OddError(1, 2),
        ExceptionGroup("several", [ValueError("one")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        json.JSONDecodeError("bad", "{", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_made_anew_arrives_as_a_remote_error(error: Exception) -> None:
    again = travelled(error)
    assert isinstance(again, RemoteError)
    assert type(error).__name__ in str(again) and str(error) in str(again)


def test_attributes_travel() -> None:
    error = MissingKeyError("m", ["a"], ["b"], [("c", [1], [2])], [("d", "x", "y")])
    again: Any = travelled(error)
    assert (again.missing, again.unexpected) == (["a"], ["b"])
    assert [tuple(entry) for entry in again.shapes] == [("c", [1], [2])]
    system: Any = travelled(StorageError("no room", "some/file", errno.ENOSPC))
    assert (system.errno, system.filename) == (errno.ENOSPC, "some/file")
    plain: Any = travelled(OSError(errno.ENOSPC, "No space left on device"))
    assert plain.errno == errno.ENOSPC and str(plain) == "[Errno 28] No space left on device"
    assert type(travelled(FileNotFoundError(errno.ENOENT, "gone", "f"))) is FileNotFoundError


def test_frames_travel() -> None:
    try:
        raise ValueError("here")
    except ValueError as error:
        _, frames = error_from_record(json.loads(json.dumps(error_to_record(error))))
    assert frames[-1].name == "test_frames_travel"


def joint(*messages: bytes | BaseException, rank: int = 0) -> CheckpointException:
    wrapped = [wrap_message(message) for message in messages]
    answers, _ = decide("agree", wrapped, None, 0, len(messages))
    own = messages[rank]
    with pytest.raises(CheckpointException) as caught:
        open_answer("agree", answers[rank], own if isinstance(own, BaseException) else None, rank)
    return caught.value


def test_the_joint_error_is_of_the_causes_type_and_of_ours() -> None:
    error: Any = joint(b"", StorageError("no room", "f", errno.ENOSPC), b"")
    assert isinstance(error, StorageError) and isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert list(error.failures) == [1]
    assert "rank 1" in str(error) and "no room" in str(error)


def test_a_class_that_cannot_be_made_of_a_message_is_named_all_the_same() -> None:
    class Coded(Exception):
        def __new__(cls, code: int, words: str) -> "Coded":
            return super().__new__(cls, code, words)

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("x")
    for cause, words in ((caught.value, "valid integer"), (Coded(3, "lost"), "lost")):
        for error in (joint(cause), joint(b"", cause)):
            assert isinstance(error, CheckpointException) and words in str(error)
            assert type(cause).__name__ in str(error)
        assert joint(cause).__cause__ is cause


def test_a_rank_that_failed_itself_keeps_its_own_error_as_the_cause() -> None:
    mine = ValueError("mine")
    assert joint(mine, b"").__cause__ is mine
    theirs = joint(mine, b"", rank=1).__cause__
    assert type(theirs) is ValueError and theirs is not mine


def test_equal_errors_of_all_ranks_are_one_sentence() -> None:
    error = joint(ValueError("same"), ValueError("same"), ValueError("same"))
    assert str(error).count("same") == 1 and "ranks 0, 1, 2" in str(error)


def test_a_rank_that_only_followed_is_not_named() -> None:
    error = joint(errors.PeerFailedError("followed"), ValueError("cause"))
    assert list(error.failures) == [1] and "followed" not in str(error)
    assert list(joint(errors.PeerFailedError("lost"), b"").failures) == [0]


def test_an_error_of_the_reduction_is_the_coordinators() -> None:
    def reduce(messages: list[bytes]) -> list[bytes]:
        raise LookupError(f"found {messages}")

    answers, own = decide("agree", [wrap_message(b"x"), wrap_message(b"y")], reduce, 1, 2)
    assert isinstance(own, LookupError)
    with pytest.raises(LookupError, match=r"found \[b'x', b'y'\]") as caught:
        open_answer("agree", answers[1], own, 1)
    assert caught.value.__cause__ is own


def test_a_reduction_has_to_answer_every_rank() -> None:
    answers, own = decide("agree", [wrap_message(b"x")] * 2, lambda messages: [b""], 0, 2)
    assert own is not None and "1 answers for 2 ranks" in str(own)
    assert len(answers) == 2
