"""What the schemes share that can send weights through process groups of torch.distributed."""

from __future__ import annotations

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint
from aiosync._options import check_bool, check_choice
from aiosync.sender.endpoint import WeightSender
from aiosync.transports.torch_distributed.process_group import check_backend


def check_process_groups(backend: str, collective: object, share_memory: object) -> None:
    """Check the arguments; raise InvalidArgumentError if one is invalid or the backend not available."""
    check_backend(backend)
    check_choice("collective", collective, ("p2p", "broadcast"))
    check_bool("share_memory", share_memory)


def may_share(backend: str, share_memory: bool) -> bool:
    """Return whether workers may view the sender's slots; never if these are on a GPU."""
    return share_memory and backend == "gloo"


async def resume_broadcasts(endpoint: Endpoint, deadline: Deadline) -> None:
    """Wait until all workers of a sender are connected, then broadcast in a new process group."""
    if isinstance(endpoint, WeightSender):  # the other ranks of a sharded trainer have no workers
        await endpoint.await_workers(deadline)
        endpoint.transfer.renew()
