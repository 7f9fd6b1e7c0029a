"""One rank of the pool: ``python -m tests.distributed.worker RANK FD PORT``."""

from __future__ import annotations

import faulthandler
import gc
import pickle
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tests.distributed.outcome import failure_of

_GROUP_TIMEOUT = timedelta(seconds=60)


def main(rank: int, descriptor: int, port: int) -> None:
    """Answer calls until the pool closes the connection."""
    faulthandler.register(signal.SIGUSR1)
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_GROUP_TIMEOUT)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message, rank, store))


def _answer(message: bytes, rank: int, store: dist.Store) -> bytes:
    try:
        call, world_size, function, args = pickle.loads(message)
        _join(f"call {call}", rank, world_size, store)
        return pickle.dumps(function(*args))
    except BaseException as error:
        return pickle.dumps(failure_of(error))


def _join(name: str, rank: int, world_size: int, store: dist.Store) -> None:
    """A fresh default group for every call: nothing that one call breaks reaches the next."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=_GROUP_TIMEOUT,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
