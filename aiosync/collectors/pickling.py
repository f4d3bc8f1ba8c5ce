"""What a collector pickles: its arguments for the workers, without the weights that schemes send, and
environments for a saved state."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from aiosync.collectors.worker_spec import WorkerSpec
from aiosync.errors import UnpicklableError
from aiosync.weights.sharded import is_sharded
from aiosync.weights.walk import is_transient


class PolicySkeleton:
    """A pickled policy without the weights that its workers receive through schemes.

    In the worker these weights are on ``meta``, and the first update allocates them. If they belong on
    another device than the CPU, they are allocated there at once, so that they arrive on that device. All
    other tensors are pickled with their values.

    The trainer keeps one skeleton for all workers, also for those that are started again.

    Args:
        policy: any object.
        sent: the modules in ``policy`` whose parameters and persistent buffers schemes send.
    """

    def __init__(self, policy: Any, sent: Iterable[nn.Module]) -> None:
        absent = {
            id(tensor): tensor for module in sent for tensor in _state(module) if _can_be_absent(tensor)
        }
        # Tensors in one storage stay together: on meta they would be separate.
        owners = Counter(_storage(tensor) for tensor in absent.values())
        shared: set[int | None] = {
            storage for storage, count in owners.items() if storage is not None and count > 1
        }
        while True:
            absent = {key: tensor for key, tensor in absent.items() if _storage(tensor) not in shared}
            pickled = _Pickler(absent)
            pickled.dump(policy)
            shared = pickled.storages & {_storage(tensor) for tensor in absent.values()} - {None}
            if not shared:
                break
        self._policy = pickled.file.getvalue()
        found = [(_stand_in(tensor), str(tensor.device)) for tensor in pickled.found]
        self._absent = cloudpickle.dumps(found)

    @property
    def nbytes(self) -> int:
        """The size of the pickled policy, in bytes."""
        return len(self._policy) + len(self._absent)

    def make(self, device: torch.device | None) -> Any:
        """Return a new policy. ``device``: of the absent weights; None: the device that each has in the
        trainer."""
        absent = [
            _allocated(tensor, device or torch.device(where)) for tensor, where in pickle.loads(self._absent)
        ]
        return _Unpickler(self._policy, absent).load()


def _state(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and persistent buffers of a module and its children, some of them repeatedly."""
    for each in module.modules():
        yield from (tensor for tensor in each._parameters.values() if tensor is not None)
        for key, tensor in each._buffers.items():
            if tensor is not None and not is_transient(each, key):
                yield tensor


def _can_be_absent(tensor: Tensor) -> bool:
    if is_sharded(tensor):
        return True  # the trainer sends it whole
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def _storage(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's memory; None: it has none."""
    if (
        is_sharded(tensor)
        or tensor.layout is not torch.strided
        or isinstance(tensor, nn.UninitializedParameter)
    ):
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return None


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor on ``meta`` in the place of a trainer's tensor."""
    sharded = is_sharded(tensor)
    if sharded:
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    else:
        found = tensor.detach().to("meta")
    return _like(tensor, found, {} if sharded else tensor.__dict__)


def _like(tensor: Tensor, data: Tensor, attributes: dict[str, Any]) -> Tensor:
    """Return ``data`` as a parameter if ``tensor`` is one, with these attributes."""
    grad = tensor.requires_grad
    found = nn.Parameter(data, grad) if isinstance(tensor, nn.Parameter) else data.requires_grad_(grad)
    found.__dict__.update(attributes)
    return found


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type in ("cpu", "meta"):
        return tensor
    return _like(tensor, torch.empty_like(tensor.detach(), device=device), tensor.__dict__)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an object without some tensors. ``absent``: id -> tensor."""

    def __init__(self, absent: dict[int, Tensor]) -> None:
        self.file = io.BytesIO()
        self.found: list[Tensor] = []  # the absent tensors, by the numbers that stand for them
        self.storages: set[int | None] = set()  # of the tensors that are pickled
        self._absent = absent
        self._numbers: dict[int, int] = {}
        super().__init__(self.file)

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._absent:
            self.storages.add(_storage(obj))
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.found)
            self.found.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Unpickles an object, with these tensors in the places of the numbers."""

    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def dump_spec(spec: WorkerSpec) -> tuple[bytes, list[Tensor]]:
    """Return the pickled spec, and the tensors that trainer and worker are to share."""
    data, shared = io.BytesIO(), []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: object) -> int | None:
            if not (spec.share_tensors and isinstance(obj, Tensor) and obj.is_shared()):
                return None
            shared.append(obj)
            return len(shared) - 1

    Pickler(data).dump(spec)
    return data.getvalue(), shared


def load_spec(data: bytes, shared: Sequence[Tensor]) -> WorkerSpec:
    """Return the spec that :func:`dump_spec` has pickled."""
    spec: WorkerSpec = _Unpickler(data, shared).load()
    return spec


def check_picklable(**arguments: Any) -> None:
    """Raise UnpicklableError if workers cannot get one of a collector's arguments."""
    for name, value in arguments.items():
        try:
            _Trial(_Discard()).dump(value)
        except Exception as exc:
            raise UnpicklableError(
                f"{name}= cannot be pickled for the workers: {type(exc).__name__}: {exc}. Expected an object "
                "that can be pickled; make other ones in the worker: in create_env_fn or policy_factory"
            ) from exc


class _Trial(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an object without its tensors, which can always be pickled."""

    def persistent_id(self, obj: object) -> int | None:
        return 0 if isinstance(obj, Tensor) else None


class _Discard:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _EnvPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an environment that goes on."""

    def reducer_override(self, obj: Any) -> Any:
        # torchrl's ParallelEnv closes itself when it is pickled.
        parallel = getattr(sys.modules.get("torchrl.envs.batched_envs"), "ParallelEnv", ())
        if isinstance(obj, parallel) and not obj.is_closed:
            raise UnpicklableError(
                "a ParallelEnv with running processes cannot be copied: give a function that makes it"
            )
        return super().reducer_override(obj)


_ENV_PICKLE: Any = SimpleNamespace(__name__=__name__, Pickler=_EnvPickler)  # stands for a module


def dump_env(env: Any) -> bytes:
    """Return an environment that goes on as bytes, for :func:`load_env`. Raises what pickling raises;
    UnpicklableError: pickling would end the environment."""
    data = io.BytesIO()
    # torch.save(): tensors that share memory share it again when they are loaded.
    torch.save(env, data, pickle_module=_ENV_PICKLE, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return data.getvalue()


def load_env(data: bytes) -> Any:
    """Return a copy of the environment that :func:`dump_env` has pickled. Raises what unpickling raises."""
    return torch.load(io.BytesIO(data), weights_only=False)


def copy_env(env: Any) -> Any:
    """Return a copy of an environment. UnpicklableError: it cannot be copied."""
    try:
        return load_env(dump_env(env))
    except UnpicklableError:
        raise
    except Exception:  # noqa: BLE001 - an environment's pickle methods may raise anything
        return copy.deepcopy(env)  # of some objects that cannot be pickled there are copies
