"""aiosync: a trainer's model weights to the workers that roll out the policy, as coroutines.

Begin with :class:`SharedMemWeightSyncScheme`; :mod:`aiosync.sync` has the same for callers without an
event loop.
"""

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
