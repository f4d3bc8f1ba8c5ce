"""Models in actors that take weights by a method of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from aiosync import InvalidArgumentError, LayoutMismatchError, RemoteApplyError, WorkerLostError
from aiosync.schemes.ray_modules import RayModuleTransformReceiver, RayModuleTransformScheme
from aiosync.transports.ray.transport import RayActor, RayModuleActor, put_weights
from tests.kit.clock import BRIEF, PATIENCE, within
from tests.kit.models import Norm, Other, Uniform, fill, value_of
from tests.ray.actors import Collector, Module, ModuleElsewhere, Moduleless
from tests.ray.hosts import start, start_one

ray = pytest.importorskip("ray")


@asynccontextmanager
async def sender_to(
    *actors: Any, method: Any = "tensordict", **init: Any
) -> AsyncIterator[RayModuleTransformScheme]:
    scheme = RayModuleTransformScheme(method, timeout=PATIENCE)
    scheme.init_on_sender(actors=actors, **init)
    try:
        await within(scheme.connect())
        yield scheme
    finally:
        await within(scheme.aclose())
        for actor in actors:
            ray.kill(getattr(actor, "_actor", actor))


@pytest.mark.parametrize("method", ["tensordict", "state_dict"])
async def test_each_update_is_a_call_of_the_method(method: str) -> None:
    model = Uniform()
    actors = start(Module, 2, Uniform(-1.0))
    async with sender_to(*actors, method=method, model=model) as scheme:
        for version in (1, 2, 3):
            fill(model, version)
            assert (await scheme.send()).ok
        for actor in actors:
            assert await actor.calls.remote() == [(method, value) for value in (0, 1, 2, 3)]
            assert await actor.value.remote() == 3
            assert await actor.parameters.remote() == len(list(model.parameters()))


@pytest.mark.parametrize("method", ["tensordict", "state_dict"])
async def test_buffers_and_frozen_parameters(method: str) -> None:
    model = Norm()
    model.linear.weight.requires_grad_(False)
    actor = start_one(Module, Norm())
    async with sender_to(actor, method=method, model=model) as scheme:
        model.get_buffer("norm.running_var").fill_(5.0)
        await scheme.send()
        state = await actor.state.remote()
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        await actor.write_buffers.remote()  # its own: what was sent is not touched
        assert (await scheme.send()).ok


@pytest.mark.parametrize("method", ["tensordict", "state_dict"])
async def test_a_method_that_raises_is_called_again_with_what_was_there(method: str) -> None:
    model, actor = Uniform(), start_one(Module, Uniform(-1.0))
    async with sender_to(actor, method=method, model=model) as scheme:
        fill(model, 13)
        with pytest.raises(RemoteApplyError, match="thirteen is refused") as caught:
            await scheme.send()
        assert caught.value.remote_type == "ArithmeticError"
        assert await actor.value.remote() == 0
        fill(model, 2)
        assert (await scheme.send()).ok
        assert await actor.value.remote() == 2


async def test_version_0_is_what_the_actor_has_where_nobody_says_it() -> None:
    actor = start_one(Module, Uniform(7.0))
    async with sender_to(actor) as scheme:
        assert await actor.value.remote() == 7
        model = Uniform()
        fill(model, 8)
        assert (await scheme.send(model)).ok
        assert await actor.value.remote() == 8
        with pytest.raises(InvalidArgumentError, match="no weights"):
            await scheme.send()


@pytest.mark.parametrize("given", ["actor_refs", "remote_collectors", "ray_transform", "context"])
async def test_other_names_of_actors_and_models(given: str) -> None:
    actor, model = start_one(ModuleElsewhere, Uniform(7.0)), Uniform()
    transform = SimpleNamespace(_actor=actor)
    scheme = RayModuleTransformScheme("state_dict", timeout=PATIENCE)
    context = SimpleNamespace(actor_refs=[transform], source_model=model)
    if given == "context":
        scheme.init_on_sender("policy", context)
    elif given == "ray_transform":
        scheme.init_on_sender("policy", ray_transform=transform)  # begins with the actor's weights
    else:
        scheme.init_on_sender("policy", source_model=model, **{given: [transform]})
    async with scheme:
        assert await actor.value.remote() == (7 if given == "ray_transform" else 0)
        fill(model, 3)
        assert (await scheme.send(model)).ok
        assert (await actor.calls.remote())[-1] == ("state_dict", 3)
    ray.kill(actor)


async def test_an_actor_that_shows_no_module() -> None:
    model, actor = Uniform(), start_one(Moduleless)
    async with sender_to(actor, model=model) as scheme:
        fill(model, 4)
        assert (await scheme.send()).ok
        assert await actor.got.remote() == 4


async def test_a_module_that_does_not_fit() -> None:
    actor = start_one(Module, Other())
    with pytest.raises(LayoutMismatchError):
        async with sender_to(actor, model=Uniform()):
            raise AssertionError("not reached")


async def test_an_actor_without_such_a_method() -> None:
    actor = start_one(Collector)
    with pytest.raises(RemoteApplyError, match="has no method _update_weights_tensordict"):
        async with sender_to(actor, model=Uniform()):
            raise AssertionError("not reached")


@pytest.mark.parametrize("path", ["env.transform[0]", "env.transform[1]"])
async def test_found_by_a_dotted_path(path: str) -> None:
    actor = start_one(Module, Uniform(-1.0))
    found = actor if path.endswith("[1]") else SimpleNamespace(_actor=actor)
    context = SimpleNamespace(env=SimpleNamespace(transform=[found, found]))
    model, scheme = Uniform(), RayModuleTransformScheme(timeout=PATIENCE)
    scheme.init_on_sender(context=context, model_id=path, model=model)
    async with scheme:
        fill(model, 3)
        await scheme.send()
        assert await actor.value.remote() == 3


def test_nobody_to_send_to() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no actor"):
        RayModuleTransformScheme().init_on_sender(model=Uniform())
    with pytest.raises(AttributeError, match=r"transform\[3\]"):
        context = SimpleNamespace(env=SimpleNamespace(transform=[]))
        RayModuleTransformScheme().init_on_sender(context=context, model_id="env.transform[3]")


@pytest.mark.parametrize("arguments", [{"update_method": "pickle"}, {"commit": "copy"}])
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="'state_dict'"):
        RayModuleTransformScheme(**arguments)


# -- transports alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tensordict", "state_dict"])
async def test_a_transport_to_an_actor_with_a_module(method: Any) -> None:
    actor, model = start_one(Module, Uniform(-1.0)), Uniform()
    transport = RayModuleActor(SimpleNamespace(_actor=actor), method)
    assert transport.check_connection()
    fill(model, 6)
    await transport.send_weights(model, timeout=PATIENCE)
    assert await actor.value.remote() == 6
    fill(model, 13)
    await transport.send_weights_async(model, timeout=PATIENCE)
    with pytest.raises(RemoteApplyError, match="thirteen"):
        await transport.wait_ack()
    await transport.aclose()
    assert not transport.check_connection()


async def test_one_put_for_several_actors() -> None:
    actors = start(Collector, 3)
    model = Uniform()
    fill(model, 5)
    put = await put_weights(model)
    transports = [RayActor(actor, worker_idx=i) for i, actor in enumerate(actors)]
    await asyncio.gather(*(t.send_weights(put, timeout=PATIENCE) for t in transports))
    assert [await actor.heard.remote() for actor in actors] == [[5.0]] * 3
    with pytest.raises(
        InvalidArgumentError,
        match="expected weights that were put as 'state_dict' for this actor, got 'tensordict'",
    ):
        await RayModuleActor(actors[0], "state_dict").send_weights(put, timeout=PATIENCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
async def test_a_compiled_module_with_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

    model, actor = Tied(), start_one(Module, Tied())
    fill(model, 4)
    await RayModuleActor(actor).send_weights(torch.compile(model), timeout=PATIENCE)
    assert await actor.value.remote() == 4
    assert await actor.parameters.remote() == 3


async def test_calls_of_an_actor() -> None:
    actor = start_one(Collector)
    transport = RayActor(actor, worker_idx=3)
    assert await transport.call("heard", timeout=PATIENCE) == []
    with pytest.raises(InvalidArgumentError, match="worker 3 has no nonsense"):
        await transport.call("nonsense", timeout=PATIENCE)
    with pytest.raises(InvalidArgumentError, match="_receive_weights_scheme"):
        await transport.send_weights(None, timeout=PATIENCE)
    busy = asyncio.create_task(transport.call("sleep", 3 * BRIEF, timeout=BRIEF))
    with pytest.raises(TimeoutError, match="worker 3"):
        await busy
    ray.kill(actor)
    with pytest.raises(WorkerLostError, match="worker 3"):
        await transport.call("heard", timeout=PATIENCE)


async def test_torchrls_own_transform() -> None:
    module = pytest.importorskip("torchrl.envs.transforms.module")
    tensordict_nn = pytest.importorskip("tensordict.nn")

    def make() -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        return tensordict_nn.TensorDictModule(net, in_keys=["observation"], out_keys=["action"])

    loop = asyncio.get_running_loop()
    transform = await loop.run_in_executor(None, lambda: module.RayModuleTransform(module=make(), num_cpus=0))
    async with sender_to(transform) as scheme:
        for version in (1, 2):
            model = make()
            fill(model, version)
            assert (await scheme.send(model)).ok
            there = await transform._actor._getattr.remote("module")
            assert value_of(there) == version


@pytest.mark.parametrize("hidden", [False, True])
def test_a_method_that_is_async(hidden: bool) -> None:
    """Also one that a decorator hides: it would not run, and the update would count as applied."""

    class Actor:
        async def _update_weights_tensordict(self, params: Any) -> None:
            raise AssertionError("not run")

    actor = Actor()
    if hidden:
        method = actor._update_weights_tensordict
        actor._update_weights_tensordict = lambda params: method(params)  # type: ignore[method-assign]
    with pytest.raises(InvalidArgumentError, match="is async"):
        RayModuleTransformReceiver.method_of(actor, "tensordict")({})
