"""torchrl's inference server, with the twins in the place of its schemes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport

from aiosync import sync
from tests.compat.policies import make_policy, mark
from tests.kit.clock import PATIENCE


@pytest.mark.parametrize("name", ["SharedMem", "MultiProcess", "TCP"])
def test_every_answer_says_the_version_that_acted(name: str) -> None:
    served, trained = make_policy(), make_policy()
    scheme = getattr(sync, f"{name}WeightSyncScheme")(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiver = copy.copy(scheme)
    server = InferenceServer(served, ThreadingTransport(), weight_sync=receiver)
    answers: list[tuple[list[float], int]] = []
    enough = threading.Event()

    def ask() -> None:
        client = server.client()
        while not enough.is_set():
            answer = client(TensorDict({"observation": torch.randn(4)}, []))
            answers.append((answer["marks"].tolist(), int(answer["policy_version"])))

    asking = threading.Thread(target=ask)
    with _serving(scheme, server):
        asking.start()
        try:
            for version in range(1, 51):
                mark(trained, version)
                scheme.send()
                before = len(answers)
                while version % 5 == 0 and len(answers) < before + 2 and asking.is_alive():
                    enough.wait(0.001)
        finally:
            enough.set()
            asking.join(PATIENCE)
        assert server.policy_version == 50
    receiver.close()
    assert all(marks == [version, version] for marks, version in answers)
    assert len({version for _, version in answers}) >= 10


@contextmanager
def _serving(scheme: sync.WeightSyncScheme, server: InferenceServer) -> Iterator[None]:
    """Both connected; neither can be without the other."""
    connecting = threading.Thread(target=scheme.connect)
    connecting.start()
    try:
        server.start()
        connecting.join(PATIENCE)
        assert scheme.synchronized_on_sender
        yield
    finally:
        server.shutdown()
        scheme.close()
