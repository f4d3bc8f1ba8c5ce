"""aiosync: a trainer's model weights to the workers that roll out the policy, as coroutines.

Begin with :class:`SharedMemWeightSyncScheme`; :mod:`aiosync.sync` has the same for callers without an
event loop.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiosync.errors import (
        AiosyncError,
        AlreadyConnectedError,
        ArenaAllocationError,
        BlockingCallError,
        ForkedEndpointError,
        FrameError,
        GatherError,
        HandshakeError,
        InsecureTransportError,
        InvalidArgumentError,
        JointUpdateError,
        LayoutMismatchError,
        NotConnectedError,
        NotInitializedError,
        OptionConflictError,
        ProtocolError,
        RelayRingError,
        RemoteApplyError,
        SenderFullError,
        SyncTimeoutError,
        UnknownModelError,
        UnknownWorkerError,
        UnpicklableError,
        UnsupportedTensorError,
        WeightSourceError,
        WorkerError,
        WorkerLostError,
        WrongEventLoopError,
    )
    from aiosync.events import SyncEvent
    from aiosync.receiver.endpoint import WeightReceiver
    from aiosync.relay.relay import WeightRelay
    from aiosync.reports import SendReport, WorkerReport, WorkerState
    from aiosync.schemes.base import WeightSyncScheme
    from aiosync.schemes.distributed import DistributedWeightSyncScheme
    from aiosync.schemes.joint import JointUpdate, atomic
    from aiosync.schemes.memory import MemoryWeightSyncScheme
    from aiosync.schemes.multiprocess import MultiProcessWeightSyncScheme
    from aiosync.schemes.none import NoWeightSyncScheme
    from aiosync.schemes.ray import RayWeightSyncScheme
    from aiosync.schemes.ray_modules import (
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
    )
    from aiosync.schemes.rpc import RPCWeightSyncScheme
    from aiosync.schemes.shared_memory import SharedMemWeightSyncScheme
    from aiosync.schemes.standalone.distributed import DistributedTransport
    from aiosync.schemes.standalone.mp import MPTransport
    from aiosync.schemes.standalone.ray import RayActorTransport, RayTransport
    from aiosync.schemes.standalone.rpc import RPCTransport
    from aiosync.schemes.standalone.shared_memory import SharedMemTransport
    from aiosync.schemes.standalone.tcp import TCPTransport
    from aiosync.schemes.tcp import TCPWeightSyncScheme
    from aiosync.sender.endpoint import WeightSender
    from aiosync.stats import PhaseStats, SchemeStats
    from aiosync.transports.base import Listener
    from aiosync.transports.contract import Transport
    from aiosync.transports.memory import Fault, MemoryTransport
    from aiosync.transports.tcp.tls import TLSConfig
    from aiosync.weights.layout import Layout
    from aiosync.weights.resolve import resolve_model
    from aiosync.weights.strategy import WeightStrategy

__version__ = "0.1.0"

__all__ = [
    "AiosyncError",
    "AlreadyConnectedError",
    "ArenaAllocationError",
    "BlockingCallError",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "Fault",
    "ForkedEndpointError",
    "FrameError",
    "GatherError",
    "HandshakeError",
    "InsecureTransportError",
    "InvalidArgumentError",
    "JointUpdate",
    "JointUpdateError",
    "Layout",
    "LayoutMismatchError",
    "Listener",
    "MPTransport",
    "MemoryTransport",
    "MemoryWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "NotConnectedError",
    "NotInitializedError",
    "OptionConflictError",
    "PhaseStats",
    "ProtocolError",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RelayRingError",
    "RemoteApplyError",
    "SchemeStats",
    "SendReport",
    "SenderFullError",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "SyncEvent",
    "SyncTimeoutError",
    "TCPTransport",
    "TCPWeightSyncScheme",
    "TLSConfig",
    "Transport",
    "UnknownModelError",
    "UnknownWorkerError",
    "UnpicklableError",
    "UnsupportedTensorError",
    "WeightReceiver",
    "WeightRelay",
    "WeightSender",
    "WeightSourceError",
    "WeightStrategy",
    "WeightSyncScheme",
    "WorkerError",
    "WorkerLostError",
    "WorkerReport",
    "WorkerState",
    "WrongEventLoopError",
    "__version__",
    "atomic",
    "resolve_model",
]

# Module -> names. It is imported when one of them is used: to import torch takes seconds, and a wrong command
# line is to be refused at once.
_NAMES = {
    "errors": (
        "AiosyncError",
        "AlreadyConnectedError",
        "ArenaAllocationError",
        "BlockingCallError",
        "ForkedEndpointError",
        "FrameError",
        "GatherError",
        "HandshakeError",
        "InsecureTransportError",
        "InvalidArgumentError",
        "JointUpdateError",
        "LayoutMismatchError",
        "NotConnectedError",
        "NotInitializedError",
        "OptionConflictError",
        "ProtocolError",
        "RelayRingError",
        "RemoteApplyError",
        "SenderFullError",
        "SyncTimeoutError",
        "UnknownModelError",
        "UnknownWorkerError",
        "UnpicklableError",
        "UnsupportedTensorError",
        "WeightSourceError",
        "WorkerError",
        "WorkerLostError",
        "WrongEventLoopError",
    ),
    "events": ("SyncEvent",),
    "receiver.endpoint": ("WeightReceiver",),
    "relay.relay": ("WeightRelay",),
    "reports": (
        "SendReport",
        "WorkerReport",
        "WorkerState",
    ),
    "schemes.base": ("WeightSyncScheme",),
    "schemes.distributed": ("DistributedWeightSyncScheme",),
    "schemes.joint": (
        "JointUpdate",
        "atomic",
    ),
    "schemes.memory": ("MemoryWeightSyncScheme",),
    "schemes.multiprocess": ("MultiProcessWeightSyncScheme",),
    "schemes.none": ("NoWeightSyncScheme",),
    "schemes.ray": ("RayWeightSyncScheme",),
    "schemes.ray_modules": (
        "RayModuleTransformReceiver",
        "RayModuleTransformScheme",
        "RayModuleTransformSender",
    ),
    "schemes.rpc": ("RPCWeightSyncScheme",),
    "schemes.shared_memory": ("SharedMemWeightSyncScheme",),
    "schemes.standalone.distributed": ("DistributedTransport",),
    "schemes.standalone.mp": ("MPTransport",),
    "schemes.standalone.ray": (
        "RayActorTransport",
        "RayTransport",
    ),
    "schemes.standalone.rpc": ("RPCTransport",),
    "schemes.standalone.shared_memory": ("SharedMemTransport",),
    "schemes.standalone.tcp": ("TCPTransport",),
    "schemes.tcp": ("TCPWeightSyncScheme",),
    "sender.endpoint": ("WeightSender",),
    "stats": (
        "PhaseStats",
        "SchemeStats",
    ),
    "transports.base": ("Listener",),
    "transports.contract": ("Transport",),
    "transports.memory": (
        "Fault",
        "MemoryTransport",
    ),
    "transports.tcp.tls": ("TLSConfig",),
    "weights.layout": ("Layout",),
    "weights.resolve": ("resolve_model",),
    "weights.strategy": ("WeightStrategy",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # which would take every name for one of these

    def __getattr__(name: str) -> Any:
        module = f"aiosync.{_MODULE_OF.get(name, name)}"
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        imported = importlib.import_module(module)
        found = globals()[name] = getattr(imported, name) if name in _MODULE_OF else imported
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
