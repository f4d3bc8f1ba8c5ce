"""Blocking twins with actors, and the older interface."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from aiosync import AiosyncError, InvalidArgumentError, RemoteApplyError, UnknownWorkerError, sync
from aiosync.sync.updaters import RayWeightUpdater
from tests.kit.clock import PATIENCE
from tests.kit.models import Uniform, fill, value_of
from tests.ray.actors import Collector

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def collectors(_cluster: None) -> list[Any]:
    """For all tests here."""
    made: Any = ray.remote(num_cpus=0)(Collector)
    return [made.remote() for _ in range(2)]


@pytest.fixture
def told(collectors: list[Any]) -> list[Any]:
    """The same; they have forgotten what they were told."""
    ray.get([collector.forget.remote() for collector in collectors])
    return collectors


def test_a_blocking_sender(told: list[Any]) -> None:
    model = Uniform()
    scheme = sync.RayWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=model, actors=told[:1])
    with scheme:
        fill(model, 1)
        assert scheme.send().ok
        assert scheme.add_worker(told[1]) == 1
        fill(model, 2)
        scheme.send_async()
        assert scheme.wait_async().ok
        assert ray.get([actor.value.remote() for actor in told]) == [2, 2]
        assert ray.get(told[0].heard.remote()) == [0, 1, 2]


def test_torchrls_transform_with_the_twin_for_its_scheme() -> None:
    transforms = pytest.importorskip("torchrl.envs.transforms.module")
    tensordict_nn = pytest.importorskip("tensordict.nn")

    def make() -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        return tensordict_nn.TensorDictModule(net, in_keys=["observation"], out_keys=["action"])

    scheme = sync.RayModuleTransformScheme(timeout=PATIENCE)
    transform = transforms.RayModuleTransform(module=make(), num_cpus=0, weight_sync_scheme=scheme)
    try:
        assert scheme.version == 0
        for version in (1, 2):
            model = make()
            fill(model, version)
            assert scheme.send(model).ok
            assert value_of(ray.get(transform._actor._getattr.remote("module"))) == version
    finally:
        scheme.close()
        ray.kill(transform._actor)


def test_the_older_interface(told: list[Any]) -> None:
    model = Uniform()
    updater = RayWeightUpdater(model, told)
    hooks = []
    updater.register_post_hook(lambda: hooks.append(1))
    fill(model, 1)
    updater.push_weights()
    fill(model, 2)
    updater(model)
    updater.push_weights(model, worker_ids=1)
    assert ray.get([actor.heard.remote() for actor in told]) == [[1, 2], [1, 2, 2]]
    assert len(hooks) == 3
    fill(model, 13)
    with pytest.raises(RemoteApplyError, match="thirteen is refused"):
        updater.push_weights()
    fill(model, 3)
    updater.push_weights(wait=False)
    updater.push_weights(worker_ids=[0])
    assert ray.get(told[0].heard.remote()) == [1, 2, 3, 3]
    with pytest.raises(UnknownWorkerError):
        updater.push_weights(worker_ids=7)
    updater.close()


def test_the_older_interface_leaves_workers_out(told: list[Any]) -> None:
    model = Uniform()
    updater = RayWeightUpdater(model, told, max_interval=2)
    for value in range(1, 8):
        fill(model, value)
        updater.push_weights()
    assert ray.get([actor.heard.remote() for actor in told]) == [[3, 6]] * 2
    updater.close()
    with pytest.raises(InvalidArgumentError, match="max_interval"):
        RayWeightUpdater(model, told, max_interval="often")  # type: ignore[arg-type]


def test_backends_by_name() -> None:
    for name, kind in (
        ("ray", sync.RayWeightSyncScheme),
        ("ray_module", sync.RayModuleTransformScheme),
    ):
        assert isinstance(sync.WeightSyncScheme.from_backend(name), kind)
    with pytest.raises(AiosyncError, match="ray, ray_module"):
        sync.WeightSyncScheme.from_backend("raay")
