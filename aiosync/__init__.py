"""aiosync: a trainer's model weights to the workers that roll the policy out, as coroutines.

Begin with :class:`SharedMemWeightSyncScheme`; :mod:`aiosync.sync` has the same for callers without an
event loop.
"""

from aiosync import _compiler_later  # noqa: F401 - before all that imports tensordict
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
    ProtocolError,
    RelayRingError,
    RemoteApplyError,
    SenderFullError,
    SyncTimeoutError,
    UnknownWorkerError,
    UnsupportedTensorError,
    WeightSourceError,
    WorkerError,
    WorkerLostError,
    WrongEventLoopError,
)
from aiosync.schemes.atomic import JointUpdate, atomic
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.distributed import DistributedWeightSyncScheme
from aiosync.schemes.memory import MemoryWeightSyncScheme
from aiosync.schemes.multiprocess import MultiProcessWeightSyncScheme
from aiosync.schemes.none import NoWeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.ray_modules import (
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
)
from aiosync.schemes.receiver import WeightReceiver
from aiosync.schemes.relay import WeightRelay
from aiosync.schemes.report import SendReport, WorkerReport, WorkerState
from aiosync.schemes.rpc import RPCWeightSyncScheme
from aiosync.schemes.sender import WeightSender
from aiosync.schemes.shared import SharedMemWeightSyncScheme
from aiosync.schemes.stats import PhaseStats, SchemeStats, SyncEvent
from aiosync.schemes.tcp import TCPWeightSyncScheme
from aiosync.transports.base import Listener, Transport
from aiosync.transports.carrier import MPTransport
from aiosync.transports.distributed import DistributedTransport
from aiosync.transports.memory import Fault, MemoryTransport
from aiosync.transports.ray import RayActorTransport, RayTransport
from aiosync.transports.rpc import RPCTransport
from aiosync.transports.shared_memory import SharedMemTransport
from aiosync.transports.tcp import TCPTransport
from aiosync.transports.tls import TLSConfig
from aiosync.weights import Layout, WeightStrategy, resolve_model

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
    "UnknownWorkerError",
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
