"""What a block of the documentation needs around it to run, by the name in the comment before the block.

``{block}`` is where the block goes, with the indentation of that line.
"""

from __future__ import annotations

import re
import textwrap

__all__ = ["AROUND", "surrounded"]

AROUND = {
    # Workers, and an end of what would go on for ever.
    "collecting": """
import asyncio
import functools

from aiosync import collectors
from tests.collectors.worlds import Counting, make_policy

MultiCollector = functools.partial(collectors.MultiCollector, total_frames=600, start_method="forkserver")
make_env = functools.partial(Counting, 0)
policy = make_policy()


async def main() -> None:
    {block}
    assert collector.policy_version == 3


if __name__ == "__main__":
    asyncio.run(main())
""",
    # A trainer with a worker; the block comes before two sends.
    "trainer": """
import asyncio

import prometheus_client

from aiosync import timeline
from tests.kit.models import Uniform
from tests.kit.tcp import join, make_worker, sender_of

serve = prometheus_client.start_http_server
prometheus_client.start_http_server = lambda port: serve(0)  # another program may have that port


async def main() -> None:
    async with sender_of(Uniform()) as scheme:
        {block}
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        await scheme.send()
        await scheme.send()
        await worker.close()


asyncio.run(main())
""",
    # A server's process: nothing is connected.
    "server": """
import secrets

from torch import nn

from aiosync import TCPWeightSyncScheme

token = secrets.token_hex(16)
policy = nn.Linear(4, 2)
{block}
assert isinstance(scheme, TCPWeightSyncScheme)
""",
    # A program that starts workers of its own.
    "starting": """
import multiprocessing

from aiosync import SharedMemWeightSyncScheme
from torch import nn


def worker(scheme: SharedMemWeightSyncScheme) -> None:
    scheme.init_on_receiver(model_id="policy", model=nn.Linear(2, 2), worker_idx=0)


if __name__ == "__main__":
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=nn.Linear(2, 2), num_workers=1)
    {block}
    for child in multiprocessing.active_children():
        child.join()
        assert child.exitcode == 0
""",
}


def surrounded(name: str, block: str) -> str:
    """The program that a block is a part of."""
    return re.sub(
        r"^( *)\{block\}\n", lambda found: textwrap.indent(block, found[1]), AROUND[name], flags=re.MULTILINE
    )
