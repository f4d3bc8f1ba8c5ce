"""Models with adapters: ``peft="merged"``, ``"as_is"`` and ``"adapter"``."""

from __future__ import annotations

import asyncio
import copy
import itertools
import multiprocessing
import pickle
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import xxhash
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from tensordict.nn import TensorDictModule
from torch import nn

import aiosync.sync
from aiosync import (
    LayoutMismatchError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncTimeoutError,
    TCPWeightSyncScheme,
    UnsupportedTensorError,
    WeightRelay,
    WeightStrategy,
    WeightSyncScheme,
)
from aiosync.collectors import MultiCollector
from aiosync.weights.layout import Layout
from aiosync.weights.peft import Cancelled, presumed
from tests.kit.clock import PATIENCE, within
from tests.weights.models import Adapter, Forwarding
from tests.weights.peft_models import KINDS, base_model, generated, train, with_adapters

# PEFT uses an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MODES = ("merged", "as_is", "adapter")


def names(model: Any, peft: Any) -> set[str]:
    return set(WeightStrategy("state_dict", peft=peft).extract_weights(model).keys())


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def worker_model(kind: str, peft: str) -> Any:
    return base_model(kind) if peft == "merged" else with_adapters(kind)


@asynccontextmanager
async def connected(
    trainer: Any, worker: Any, *, scheme: WeightSyncScheme | None = None, **options: Any
) -> AsyncIterator[tuple[WeightSyncScheme, WeightSyncScheme]]:
    """A sender and a receiver on this event loop, which receives."""
    sender = scheme or MemoryWeightSyncScheme(timeout=PATIENCE, **options)
    sender.init_on_sender(model_id="policy", model=trainer, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=worker, worker_idx=0)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sender.connect())
            tasks.create_task(receiver.connect())
        async with receiver.receiving():
            yield sender, receiver
    finally:
        await receiver.aclose()
        await sender.aclose()


async def refusals(trainer: Any, worker: Any, **options: Any) -> list[BaseException | None]:
    """The errors of the sender's and the receiver's ``connect``."""
    sender = MemoryWeightSyncScheme(timeout=PATIENCE, **options)
    sender.init_on_sender(model_id="policy", model=trainer, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=worker, worker_idx=0)
    both = await within(asyncio.gather(sender.connect(), receiver.connect(), return_exceptions=True))
    await receiver.aclose()
    await sender.aclose()
    return list(both)


# -- what is sent -----------------------------------------------------------------------------------


def test_the_entries_of_each_mode() -> None:
    model = with_adapters("qwen2", modules_to_save=["norm"], bias="lora_only")
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["norm"]))
    whole = set(model.state_dict())
    assert names(model, "as_is") == whole
    sent = names(model, "adapter")
    parts = {part for name in sent for part in name.split(".")}
    assert {"lora_A", "modules_to_save", "default", "second"} <= parts
    # What bias="lora_only" trains of the base is sent too; all that is left out is frozen.
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained <= sent
    assert {name for name in whole - sent if "lora_" in name or "modules_to_save" in name} == set()
    assert sent < whole
    assert names(model, "merged") == set(base_model("qwen2").state_dict())


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
        LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2]),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=["ia3", "dora", "tokens", "prompt"],
)
def test_other_kinds_of_adapters(config: Any) -> None:
    model = get_peft_model(base_model("llama"), config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # as PEFT loads them to act with: an adapter is one by its place
    sent = names(model, "adapter")
    assert trained <= sent < set(model.state_dict())
    assert not any("base_layer" in name or "embed_tokens.weight" in name for name in sent)


@pytest.mark.parametrize("peft", MODES)
def test_the_live_model_is_not_touched(peft: Any) -> None:
    model = with_adapters("gpt2")
    train(model)
    before = bits(model)
    for source in (model, TensorDictModule(model, in_keys=["x"], out_keys=["y"])):
        WeightStrategy(peft=peft).extract_weights(source)
        assert bits(model) == before


async def test_a_model_is_merged_in_a_thread_wherever_it_is() -> None:
    threads = []

    class Recording(Adapter):
        def merge_and_unload(self) -> nn.Module:
            threads.append(threading.current_thread())
            return super().merge_and_unload()

    for trainer in (Recording(), Forwarding(Recording()), Forwarding(Recording(), name="base_model")):
        worker = nn.Linear(3, 3) if not isinstance(trainer, Forwarding) else copy.deepcopy(trainer)
        if isinstance(trainer, Forwarding) and trainer._inner_name == "base_model":
            worker = nn.Linear(3, 3)
        elif isinstance(trainer, Forwarding):
            worker.module = nn.Linear(3, 3)
        async with connected(trainer, worker) as (sender, _):
            threads.clear()
            await sender.send()
            assert len(threads) == 1
            assert threads[0] is not threading.main_thread()


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
def test_merged_from_any_state_of_the_trainer() -> None:
    model = with_adapters("llama")
    train(model)
    strategy = WeightStrategy("state_dict")
    expected = strategy.extract_weights(model)
    with model.disable_adapter():
        found = strategy.extract_weights(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("second")
    found = strategy.extract_weights(model)
    assert not all(torch.equal(found[name], expected[name]) for name in expected)
    model.set_adapter("default")
    model.merge_adapter()
    found = strategy.extract_weights(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


async def test_a_strategy_of_another_library() -> None:
    class Theirs:
        extract_as = "tensordict"

        def extract_weights(self, source: Any) -> Any:
            return {"0.bias": source[0].bias.detach() + 1, "0.weight": source[0].weight.detach()}

        def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
            destination.load_state_dict(weights)

    trainer: Any = nn.Sequential(nn.Linear(2, 2))
    worker: Any = nn.Sequential(nn.Linear(2, 2))
    scheme = MemoryWeightSyncScheme(timeout=PATIENCE)
    scheme.strategy = Theirs()  # type: ignore[assignment]
    async with connected(trainer, worker, scheme=scheme) as (sender, _):
        await sender.send()
        assert torch.equal(worker[0].bias, trainer[0].bias + 1)


def test_applied_by_the_strategy_itself() -> None:
    trainer, worker = with_adapters("llama"), with_adapters("llama")
    train(trainer)
    strategy = WeightStrategy("state_dict", peft="adapter")
    weights = strategy.extract_weights(trainer)
    strategy.apply_weights(worker, weights)
    assert bits(worker) == bits(trainer)
    weights.popitem()
    with pytest.raises(LayoutMismatchError, match=r"missing: base_model.*lora_"):
        strategy.apply_weights(worker, weights)
    with pytest.raises(LayoutMismatchError, match=r"missing: .*base_layer"):
        WeightStrategy().apply_weights(worker, strategy.extract_weights(trainer))


async def test_the_option() -> None:
    scheme = SharedMemWeightSyncScheme("state_dict", peft="adapter")
    assert repr(scheme.strategy) == "WeightStrategy(extract_as='state_dict', peft='adapter')"
    scheme.init_on_sender(model_id="policy", model=with_adapters("gpt2"), num_workers=1)
    assert pickle.loads(pickle.dumps(scheme)).strategy.peft == "adapter"
    scheme.strategy = WeightStrategy(peft="as_is")
    assert copy.copy(scheme).strategy.peft == "as_is"
    assert "lora_" in str(list(scheme.prepare_weights().keys(True, True)))
    await scheme.aclose()
    twin = aiosync.sync.SharedMemWeightSyncScheme(peft="adapter")
    assert pickle.loads(pickle.dumps(twin)).strategy.peft == "adapter"
    assert WeightStrategy("tensordict").peft == "merged"
    for make in (WeightStrategy, SharedMemWeightSyncScheme):
        with pytest.raises(ValueError, match="peft='unmerged': expected 'merged', 'as_is' or 'adapter'"):
            make(peft="unmerged")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set peft in one of the two"):
        SharedMemWeightSyncScheme(WeightStrategy(peft="as_is"), peft="adapter")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no adapters"):
        WeightStrategy(peft="adapter").extract_weights(base_model("gpt2"))


# -- generate() in the workers ------------------------------------------------------------------------


async def act(models: dict[str, Any], schemes: dict[str, WeightSyncScheme], pipe: Connection) -> None:
    """Receive with all schemes; answer each message with what the models generate."""
    loop = asyncio.get_running_loop()
    for name, scheme in schemes.items():
        scheme.init_on_receiver(model_id="policy", model=models[name], worker_idx=0)
    try:
        await asyncio.gather(*(scheme.connect() for scheme in schemes.values()))
        tasks = [asyncio.create_task(scheme.get_receiver().run()) for scheme in schemes.values()]
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send({name: generated(model)[0] for name, model in models.items()})
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    finally:
        for scheme in schemes.values():
            await scheme.aclose()


def work(schemes: dict[str, WeightSyncScheme], pipe: Connection) -> None:
    torch.set_num_threads(1)
    models = {name: worker_model(*name.split("-")[:2]) for name in schemes}
    asyncio.run(act(models, schemes, pipe))


async def test_generate_in_a_worker_process_equals_the_trainers() -> None:
    ctx = multiprocessing.get_context("forkserver")
    schemes: dict[str, WeightSyncScheme] = {}
    for kind, peft in itertools.product(KINDS, MODES):
        options: dict[str, Any] = {"timeout": PATIENCE, "peft": peft}
        schemes[f"{kind}-{peft}-shared"] = SharedMemWeightSyncScheme(**options)
        schemes[f"{kind}-{peft}-tcp"] = TCPWeightSyncScheme(**options)
    for peft in MODES:
        options = {"timeout": PATIENCE, "peft": peft}
        schemes[f"gpt2-{peft}-copy"] = SharedMemWeightSyncScheme(
            "state_dict", commit="copy", timeout=PATIENCE
        )
        schemes[f"gpt2-{peft}-copy"].strategy = WeightStrategy("state_dict", peft=peft)  # type: ignore[arg-type]
        schemes[f"qwen2-{peft}-process"] = MultiProcessWeightSyncScheme(**options)
    trainers = {kind: with_adapters(kind) for kind in KINDS}
    for name, scheme in schemes.items():
        where: dict[str, Any] = {"ctx": ctx} if name.endswith("process") else {}
        scheme.init_on_sender(model_id="policy", model=trainers[name.split("-")[0]], num_workers=1, **where)
    ours, theirs = ctx.Pipe()
    process = ctx.Process(target=work, args=(schemes, theirs))
    process.start()
    theirs.close()
    ask = asyncio.get_running_loop().run_in_executor
    try:
        await asyncio.gather(*(scheme.connect() for scheme in schemes.values()))
        seen = set()
        for _ in range(3):
            expected = {kind: generated(trainer)[0] for kind, trainer in trainers.items()}
            ours.send(True)
            for name, tokens in (await within(ask(None, ours.recv))).items():
                assert tokens == expected[name.split("-")[0]], name
            seen.add(str(expected))
            for trainer in trainers.values():
                train(trainer)
            before = {kind: bits(trainer) for kind, trainer in trainers.items()}
            await asyncio.gather(*(scheme.send() for scheme in schemes.values()))
            assert before == {kind: bits(trainer) for kind, trainer in trainers.items()}
        assert len(seen) == 3
        ours.send(False)
    finally:
        for scheme in schemes.values():
            await scheme.aclose()
        ours.close()
        process.join()
        process.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_generate_in_this_process_equals_the_trainers(kind: str) -> None:
    for peft in MODES:
        trainer, worker = with_adapters(kind), worker_model(kind, peft)
        async with connected(trainer, worker, peft=peft) as (sender, receiver):
            for _ in range(2):
                train(trainer)
                report = await sender.send()
                tokens, logits = generated(trainer)
                found, similar = generated(worker)
                assert found == tokens
                torch.testing.assert_close(similar, logits, rtol=1e-3, atol=1e-3)
                if peft != "merged":
                    assert torch.equal(similar, logits)
            assert receiver.version == 2
            small = sum(p.nbytes for p in trainer.parameters() if p.requires_grad)
            assert (report.nbytes == small) is (peft == "adapter")


async def test_adapters_through_a_relay() -> None:
    trainer, worker = with_adapters("gpt2"), with_adapters("gpt2")
    up = TCPWeightSyncScheme(timeout=PATIENCE, peft="adapter")
    up.init_on_sender(model_id="policy", model=trainer)
    down = TCPWeightSyncScheme(timeout=PATIENCE)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(up.connect(min_workers=1))
        async with WeightRelay(copy.copy(up), down, model_id="policy"):
            receiver, other = copy.copy(down), copy.copy(down)
            receiver.init_on_receiver(model_id="policy", model=worker)
            await receiver.connect()
            other.init_on_receiver(model_id="policy", model=with_adapters("gpt2", seed=1))
            with pytest.raises(LayoutMismatchError, match="two base models differ"):
                await other.connect()
            async with receiver.receiving():
                train(trainer)
                await up.send()
                assert generated(worker)[0] == generated(trainer)[0]
            await receiver.aclose()
    await up.aclose()


# -- refusals -----------------------------------------------------------------------------------------


async def test_a_worker_with_another_base_is_refused() -> None:
    trainer = with_adapters("qwen2")
    for error in await refusals(trainer, with_adapters("qwen2", seed=1), peft="adapter"):
        assert isinstance(error, LayoutMismatchError)
        assert "the two base models differ" in str(error)
        name = "base_model.model.model.embed_tokens.weight"
        ours, theirs = error.differing[name]
        assert ours.startswith("float32[64, 16] of digest ")
        assert theirs.startswith("float32[64, 16] of digest ")
        assert ours != theirs
    one = with_adapters("qwen2")
    with torch.no_grad():
        one.base_model.model.model.layers[1].self_attn.q_proj.base_layer.weight[3, 2] += 1e-6
    for error in await refusals(trainer, one, peft="adapter"):
        assert isinstance(error, LayoutMismatchError)
        assert list(error.differing) == ["base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"]


@pytest.mark.parametrize("peft", ["as_is", "adapter"])
async def test_a_worker_with_another_scaling_is_refused(peft: str) -> None:
    for error in await refusals(with_adapters("gpt2"), with_adapters("gpt2", lora_alpha=8), peft=peft):
        assert isinstance(error, LayoutMismatchError)
        assert set(error.differing.values()) == {("4.0", "2.0")}
        assert all(name.endswith(".scaling.default") for name in error.differing)


@pytest.mark.parametrize(
    ("trainer", "worker", "peft"),
    [
        (with_adapters, with_adapters, "merged"),
        (base_model, with_adapters, "merged"),
        (with_adapters, base_model, "as_is"),
        (with_adapters, base_model, "adapter"),
    ],
)
async def test_the_refusal_names_the_option(trainer: Any, worker: Any, peft: str) -> None:
    for error in await refusals(trainer("llama"), worker("llama"), peft=peft):
        assert isinstance(error, LayoutMismatchError)
        assert "peft= says how they are sent: 'merged'" in str(error)
    plain = LayoutMismatchError(missing=["head.weight"])
    assert "peft" not in str(plain)


async def test_a_base_without_values_is_refused() -> None:
    worker = with_adapters("llama")
    worker.base_model.model.lm_head.to("meta")
    ours, theirs = await refusals(with_adapters("llama"), worker, peft="adapter")
    assert isinstance(theirs, UnsupportedTensorError)
    assert "load the base model first" in str(ours)
    async with connected(with_adapters("llama"), worker, peft="as_is"):
        assert generated(worker)[0] == generated(with_adapters("llama"))[0]


async def test_a_base_in_a_narrower_dtype_needs_cast() -> None:
    trainer = with_adapters("llama")
    worker = with_adapters("llama").to(torch.bfloat16)
    for error in await refusals(trainer, worker, peft="adapter"):
        assert isinstance(error, LayoutMismatchError)
        assert all("converted from bfloat16" in text for text, _ in error.differing.values())
    async with connected(trainer, worker, peft="adapter", cast=torch.bfloat16) as (sender, _):
        train(trainer)
        await sender.send()
        as_sent = copy.deepcopy(trainer).to(torch.bfloat16)
        assert bits_of_16(worker) == bits_of_16(as_sent)


def bits_of_16(model: nn.Module) -> dict[str, bytes]:
    return {name: value.view(torch.int16).numpy().tobytes() for name, value in model.state_dict().items()}


async def test_adapters_that_are_merged_in_place() -> None:
    trainer, worker = with_adapters("gpt2"), with_adapters("gpt2")
    train(trainer)
    async with connected(trainer, worker, peft="adapter") as (sender, receiver):
        before = generated(worker)[0]
        trainer.merge_adapter()
        with pytest.raises(UnsupportedTensorError, match=r"merged into its base.*unmerge_adapter"):
            await sender.send()
        trainer.unmerge_adapter()
        worker.merge_adapter()
        with pytest.raises(aiosync.RemoteApplyError, match="merged into its base"):
            await sender.send()
        assert receiver.version == 0
        worker.unmerge_adapter()
        assert generated(worker)[0] == before
        train(trainer)
        await sender.send()
        assert generated(worker)[0] == generated(trainer)[0]


async def test_a_base_that_is_trained_later_is_not_left_out() -> None:
    trainer, worker = with_adapters("llama"), with_adapters("llama")
    async with connected(trainer, worker, peft="adapter") as (sender, receiver):
        await sender.send()
        trainer.base_model.model.lm_head.weight.requires_grad_(True)
        with pytest.raises(LayoutMismatchError, match=r"unexpected: .*lm_head.weight"):
            await sender.send()
        trainer.base_model.model.lm_head.weight.requires_grad_(False)
        await sender.send()
        assert receiver.version == 2


async def test_another_model_of_a_worker_needs_the_same_base() -> None:
    trainer, worker = with_adapters("gpt2"), with_adapters("gpt2")
    async with connected(trainer, worker, peft="adapter") as (sender, receiver):
        train(trainer)
        await sender.send()
        with pytest.raises(LayoutMismatchError, match="two base models differ"):
            await receiver.rebind(model=with_adapters("gpt2", seed=1))
        another = with_adapters("gpt2")
        await receiver.rebind(model=another)
        assert generated(another)[0] == generated(trainer)[0]


async def test_a_digest_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = MemoryWeightSyncScheme(timeout=PATIENCE, peft="adapter", min_workers=0)
    sender.init_on_sender(model_id="policy", model=with_adapters("gpt2"), num_workers=1)
    await sender.connect()
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model_id="policy", model=with_adapters("gpt2"), worker_idx=0)
    threads = []

    def slow(block: memoryview) -> int:
        threads.append(threading.current_thread())
        time.sleep(0.1)
        return 0

    monkeypatch.setattr("aiosync.weights.peft.checksum_of", slow)
    begun = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        await receiver.connect(timeout=0.3)
    await sender.aclose()
    another = MemoryWeightSyncScheme(peft="adapter")
    another.init_on_sender(model_id="policy", model=with_adapters("gpt2"), num_workers=1)
    with pytest.raises(SyncTimeoutError, match="digest of the base"):
        await another.connect(timeout=0.3)
    assert len(set(threads)) == 2
    assert len(threads) < 20  # of 50 entries
    assert time.monotonic() - begun < 0.1 * 2 * 50
    assert not any(thread is threading.main_thread() or thread.is_alive() for thread in threads)
    await another.aclose()


async def test_a_restarted_trainer_with_another_base_is_not_followed() -> None:
    first = TCPWeightSyncScheme(timeout=PATIENCE, peft="adapter")
    first.init_on_sender(model_id="policy", model=with_adapters("gpt2"))
    worker = with_adapters("gpt2")
    options: dict[str, Any] = {"reconnect_for": PATIENCE, "on_sender_close": "wait", "timeout": PATIENCE}
    receiver = TCPWeightSyncScheme(first.address, **options)
    receiver.init_on_receiver(model_id="policy", model=worker)
    await asyncio.gather(first.connect(), receiver.connect())
    running = asyncio.create_task(receiver.get_receiver().run())
    await first.aclose()
    second = TCPWeightSyncScheme(first.address, timeout=PATIENCE, peft="adapter", min_workers=0)
    second.init_on_sender(model_id="policy", model=with_adapters("gpt2", seed=1))
    await second.connect()
    await within(running)
    assert "two base models differ" in str(receiver.ended)
    assert generated(worker)[0] == generated(with_adapters("gpt2"))[0]
    await receiver.aclose()
    await second.aclose()


# -- layouts ------------------------------------------------------------------------------------------


def test_a_layout_carries_what_updates_presume() -> None:
    tensors = {"a": torch.zeros(2)}
    plain, based = Layout.of(tensors), Layout.of(tensors, base={"b": "float32[1] of digest 00"})
    assert "base" not in plain.to_wire()
    assert Layout.from_wire(based.to_wire()) == based == pickle.loads(pickle.dumps(based)) != plain
    assert based.signature == plain.signature
    assert based.identity != plain.identity
    based.check_receiver({"a": torch.zeros(2), "b": torch.zeros(1)})
    for base in ([["a", ""]], [["b", "\n"]], [["b", ""], ["b", ""]], [["b", "x" * 1025]]):
        with pytest.raises(aiosync.ProtocolError):
            Layout.from_wire({**plain.to_wire(), "base": base})


def test_a_digest_is_what_the_protocol_says() -> None:
    class Wrapped(nn.Module):
        adapter_layer_names = ("lora",)

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(1536, 2049)  # more than a block
            self.lora = nn.Linear(1, 1)
            self.base_layer.requires_grad_(False)

    model, cancelled = Wrapped(), iter([False, False, True])
    found = presumed(model, "adapter", torch.float16, lambda: False)
    assert found.keys() == {"base_layer.weight", "base_layer.bias"}
    for dtype in (torch.float32, torch.float16):
        data = model.base_layer.weight.detach().to(dtype).numpy().tobytes()
        sums = [xxhash.xxh3_64_digest(data[at : at + (8 << 20)]) for at in range(0, len(data), 8 << 20)]
        text = f"[2049, 1536] of digest {xxhash.xxh3_128_hexdigest(b''.join(sums))}"
        assert presumed(model, "adapter", dtype, lambda: False)["base_layer.weight"].endswith(text)
    with pytest.raises(Cancelled):
        presumed(model, "adapter", None, lambda: next(cancelled))


# -- collectors ---------------------------------------------------------------------------------------


class World:
    """Observes ones."""

    async def reset(self, seed: int | None = None) -> Any:
        return torch.ones(4)

    async def step(self, action: Any) -> Any:
        return torch.ones(4), float(action.sum()), False, False


def adapted_policy() -> Any:
    torch.manual_seed(0)
    inner = get_peft_model(nn.Sequential(nn.Linear(4, 2)), LoraConfig(r=2, target_modules=["0"]))
    return TensorDictModule(inner, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("peft", [None, "adapter"])
async def test_a_collector_whose_policy_has_adapters(peft: Any) -> None:
    policy = adapted_policy()
    schemes = None
    if peft is not None:
        schemes = {"policy": SharedMemWeightSyncScheme(peft=peft, timeout=PATIENCE)}
    collector = MultiCollector(
        [World], policy, frames_per_batch=4, total_frames=-1, weight_sync_schemes=schemes, timeout=PATIENCE
    )
    async with collector:
        for _ in range(2):
            train(policy)
            await collector.update_policy_weights_()
            batch = await anext(collector)
        expected = policy.module(torch.ones(4)).detach()
        torch.testing.assert_close(batch["action"].reshape(-1, 2)[-1], expected)
