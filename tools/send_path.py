"""Count the files of the package that run in one ``send``, and the calls between its functions.

Usage: ``python tools/send_path.py shared|process|tcp|distributed|ray [--calls]``. The trainer is this
process, the worker a spawned one. What their event loops run is counted in steady state, by
``sys.setprofile``.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import ray
import torch

import aiosync
from aiosync.sender import early_answers

PACKAGE = str(Path(aiosync.__file__).parent) + "/"
OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {},
    "process": {},
    "tcp": {},
    "distributed": {"share_memory": False},
    "ray": {"share_memory": False},
}
"""Scheme -> its options, so that the bytes take the way that they take between machines."""

SIDE = {"distributed": 1024, "ray": 1024}
"""Scheme -> the features of its model: small ones are sent in the update message."""

WARM_UP = 3
"""Versions before the one that is counted."""


class Call(NamedTuple):
    """A call of one of the package's functions, and the file of the package that it came from."""

    file: str
    function: str
    caller: str


class Recorder:
    """Records the calls of the package's functions in this thread."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        origin = caller.f_code.co_filename.removeprefix(PACKAGE) if caller else ""
        self.calls.append(Call(path.removeprefix(PACKAGE), frame.f_code.co_qualname, origin))


def model_for(backend: str) -> torch.nn.Module:
    """The model that is sent."""
    side = SIDE.get(backend, 4)
    return torch.nn.Linear(side, side)


def work(recipe: aiosync.WeightSyncScheme | bytes, pipe: Connection[Any, Any]) -> None:
    """The worker: record the update after the warm-up, and send its calls through ``pipe``."""
    recorder = Recorder()
    if isinstance(recipe, bytes):  # it has the handle of an actor, which needs Ray to be unpickled
        ray.init(address="auto", log_to_driver=False)
    scheme: aiosync.WeightSyncScheme = pickle.loads(recipe) if isinstance(recipe, bytes) else recipe

    async def main() -> None:
        scheme.init_on_receiver(model_id="policy", model=model_for(scheme.backends[0]), worker_idx=0)
        async with scheme, scheme.receiving():
            await asyncio.to_thread(pipe.recv)  # the warm-up is over
            sys.setprofile(recorder)
            pipe.send(None)
            await asyncio.to_thread(pipe.recv)
            sys.setprofile(None)
            pipe.send(recorder.calls)
            await scheme.wait_closed()

    asyncio.run(main())


def count(backend: str) -> dict[str, list[Call]]:
    """Side -> the calls of one ``send`` of the scheme with this name."""
    model, recorder = model_for(backend), Recorder()
    early_answers._POLLING = 0.0  # how often a poll is repeated says nothing about the path
    if backend == "ray":
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    scheme = aiosync.WeightSyncScheme.from_backend(backend, **OPTIONS[backend])
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(pickle.dumps(scheme) if backend == "ray" else scheme, theirs))
    worker.start()

    async def main() -> list[Call]:
        async with scheme:
            for _ in range(WARM_UP):
                await scheme.send(model)
            ours.send(None)
            await asyncio.to_thread(ours.recv)
            sys.setprofile(recorder)
            await scheme.send(model)
            sys.setprofile(None)
            ours.send(None)
            calls: list[Call] = await asyncio.to_thread(ours.recv)
            return calls

    received = asyncio.run(main())
    worker.join()
    return {"trainer": recorder.calls, "worker": received}


def main() -> None:
    """Print the counts, and with ``--calls`` each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scheme", choices=list(OPTIONS))
    parser.add_argument("--calls", action="store_true", help="print each call")
    options = parser.parse_args()
    sides = count(options.scheme)
    for side, calls in sides.items():
        between = sum(call.file != call.caller for call in calls)
        files = len({call.file for call in calls})
        print(f"{side}: {files} files, {len(calls)} calls, {between} between files")
        for call in calls if options.calls else ():
            print(f"  {call.file}: {call.function}, from {call.caller or 'the caller or the event loop'}")
    print("both:", len({call.file for calls in sides.values() for call in calls}), "files")


if __name__ == "__main__":
    main()
