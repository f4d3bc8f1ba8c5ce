"""The sections of docs/benchmarks.md: the commands, and what each compares. The figures are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bars:
    """Bars of a chart: a row of a section's tables is one bar."""

    section: str
    label: str  # with the row's columns in braces
    column: str  # has the bar's length
    where: Mapping[str, Any] = field(default_factory=dict)  # column -> the value of the rows that count


@dataclass(frozen=True)
class Chart:
    """Horizontal bars. A line marks 1."""

    name: str  # of its file
    title: str
    about: str  # what it shows, for readers who do not see it
    bars: Sequence[Bars]
    logarithmic: bool = False
    on_page: bool = True  # whether docs/benchmarks.md shows it


@dataclass(frozen=True)
class Section:
    """A run of one case."""

    name: str  # of the file of its figures
    heading: str
    command: str  # what follows ``aiosync bench``
    about: str
    after: str = ""  # what keeps the figures from the limit
    left_out: Sequence[str] = ()  # columns
    needs_gpu: bool = False


SECTIONS = (
    Section(
        "send",
        "Sends within one machine",
        "send --workers 1,4 --contenders aiosync,torchrl",
        "aiosync's schemes, torchrl's of the same name, and one warm memcpy of the same bytes (the limit). "
        "`tiny` has 20 k parameters, `medium` 25 M (100 MB), `large` 256 M (1 GiB). A turn is one training "
        "step, which changes every weight in place and is not timed, and one `send`; with the tiny model ten "
        "of these. In mode `fresh` each send brings new tensors. A send ends with the last worker's "
        "acknowledgement. *vs aiosync* is how many times aiosync's median the row's is.",
        "A send of 100 MB is a copy by a thread on each core and a round trip between two processes, which "
        "find none of their code in the caches after it. Where the processor has AVX-512, the copy goes past "
        "the caches. torch's memcpy does not, so a send may take less time than it. The tiny model's time is "
        "mostly the wake-up of the other process.",
        ("first of its turn", "1 worker in turn"),
    ),
    Section(
        "acting",
        "Sends to workers that act",
        "acting --rounds 5",
        "The blocking twins and torchrl's schemes. Workers compute forward passes of four layers of 256 (1 "
        "MB) as fast as they can, while a thread of the library receives. The trainer sends, and then sleeps "
        "for 10 ms. `default` is torch's own number of threads. With shared memory all of torchrl's workers "
        "read one buffer (`params_map`), as its collectors' workers do; with queues each has a copy "
        "(`device_map_fn`). Without these its workers read the trainer's own memory, and nothing is sent.",
        "A send waits until each worker's forward pass has ended, and until the threads of the trainer and "
        "of the workers get a processor. A thread that has used up its share of one runs again at a tick of "
        "the kernel, 4 ms apart here. So aiosync's workers yield their processors between two forward passes "
        "while a send is in progress. torchrl writes into its workers' memory at any time, also in the "
        "middle of a forward pass. aiosync's guard, which prevents that, takes 1 to 2 % of such a pass. Both "
        "trainers send with a pause of 10 ms after each send, so the faster one sends more often in the same "
        "time, and each update takes some of the workers' time. With four workers and one thread aiosync "
        "sends about two times (shared memory) and six times (queues) as often as torchrl.",
    ),
    Section(
        "acting-as-often",
        "Sends to workers that act, as often with both",
        "acting --rounds 5 --threads 1 --workers 4 --every 120",
        "As above, but a send begins every 120 ms with both libraries: one in twenty of torchrl's sends "
        "through queues takes 100 ms or more. So *forwards/s* compares workers that get as many updates.",
    ),
    Section(
        "fanout",
        "Many receivers over TCP",
        "fanout --rounds 5",
        "A model of 50 KB. The limit is one `sendmsg` of the same bytes to each receiver's socket, and one "
        "read of its answer, in one thread. The receivers live in four processes, on the same cores as the "
        "sender. aiosync's time includes everything in the sender's process: the copy of the weights, the "
        "event loop, the session of each worker and its answer.",
    ),
    Section(
        "network",
        "Over sockets",
        "network --workers 1,4 --rounds 7",
        "Beside one blocking socket: `sendall` out of a ready buffer, `recv_into` a warm one. It copies "
        "nothing out of a trainer and checks nothing. *ratio* is that of bytes per second to all workers. "
        "Over a Unix socket only the frames go through the socket: workers read the blocks from the sender's "
        "memory.",
        "Over TCP and TLS the trainer's copy, the checksums and the encryption need processor time beside "
        "the kernel's copies. With several TLS workers up to four threads of the sender encrypt.",
    ),
    Section(
        "distributed-apart",
        "Between machines: torch.distributed and torch RPC",
        "distributed --apart --models medium,large --workers 1,2",
        "All weights go through process groups, as between machines, here over loopback. Bare gloo is one "
        "send and one receive of one tensor of the model's size, out of a ready buffer into a warm one, and "
        "a byte back, to one receiver.",
        "gloo alone keeps two cores busy over loopback. aiosync sends messages of 4 MiB, which need less "
        "processor time than one large message; the copy out of the trainer's weights, which makes an update "
        "a snapshot, needs about as much again. torch RPC runs over libuv, as with torchrl's `RPCCollector`: "
        "with torch's default a thread in each process polls shared memory without a pause.",
    ),
    Section(
        "distributed",
        "torch.distributed and torch RPC on one machine",
        "distributed --workers 1,2",
        "Workers on the sender's machine view its slots, which takes one copy for all of them. torchrl sends "
        "tensor by tensor through gloo.",
    ),
    Section(
        "ray",
        "Ray, on one node",
        "ray --models medium --workers 1,4",
        "Actors on the driver's node view its memory. torchrl sends tensor by tensor through gloo.",
        left_out=("store before, MiB", "at most, MiB", "after, MiB"),
    ),
    Section(
        "ray-apart",
        "Ray, through the object store",
        "ray --apart --models medium --workers 1,4",
        "As to actors on other nodes: an update is put into the object store once. The use of the store "
        "comes from Ray: before, some time after 100 sends without a pause, and after the scheme was closed.",
    ),
    Section(
        "collectors-plain",
        "Collectors beside a plain loop",
        "collectors --against plain --rounds 5",
        "The loop that a user would write without collectors, in one process: Gymnasium's `SyncVectorEnv`, a "
        "policy of two hidden layers of 64 called without gradients, and NumPy buffers. The collectors have "
        "the same environments and policy in each of their processes, batches of 1024 frames, and an update "
        "after each batch. `single` runs in the trainer's process, the others have two workers.",
        "*two at a time* are two plain loops in two processes: what the machine gives to two workers that "
        "wait for nothing. The trainer's process needs a part of the processors too: 0.8 ms for each batch. "
        "In one process and in turn, a CartPole step of 8 environments takes as long in the loop of the "
        "collector as in the plain loop: 123 and 124 µs. Gymnasium's copy of the observations is left out "
        "there, which takes 3 %, about as long as what the collector does more. In `single` the event loop "
        "has a turn of about 60 µs every 4 ms, which moves code and memory of the environments and the "
        "policy out of the processor's caches: the next step takes 70 µs longer, those after it 30 together. "
        "An update takes 0.6 ms. A worker's own event loop has a turn when something has arrived, which a "
        "rollout asks every 0.5 ms: to ask every 0.25 ms made batches 0.6 % slower. "
        "Between two batches, workers of `sync` wait about 1 ms for the trainer, and take 0.5 ms to deliver "
        "a batch and to begin the next one.\n\n"
        "If one thread wakes two workers, Linux may place both on one processor: in one batch of seven the "
        "other processor was idle for 3 to 8 ms. So each worker of `sync` begins its batch on a processor of "
        "its own, and the one that last ran where the trainer runs is woken last. That made 1.20 times the "
        "plain loop 1.36 times.",
    ),
    Section(
        "collectors",
        "Collectors beside torchrl's",
        "collectors --rounds 5 --total 20000",
        "`MultiCollector` and torchrl's `MultiSyncCollector` and `MultiAsyncCollector` on the same Gymnasium "
        "environments with the same policy: two workers, 200 frames in a batch, an update after each. "
        "`pixels` observes 84 by 84 by 4 new bytes at each step. Each frame records which weights acted, and "
        "is checked against its version. Memory is that of all processes, shared pages counted once.",
    ),
    Section(
        "collectors-gymenv",
        "Collectors on torchrl's own environments",
        "collectors --models gymenv-acrobot,gymenv-pendulum --rounds 5 --total 10000",
        "As above, but both libraries step torchrl's `GymEnv`.",
    ),
    Section(
        "inside-torchrl",
        "Inside torchrl's collectors",
        "collectors --inside-torchrl --parameters 1000 --rounds 2",
        "torchrl's collectors on CartPole with two workers, with aiosync's schemes and with torchrl's of the "
        "same name, and an update after each batch of 200 frames. A `Collector` and an `InferenceServer` act "
        "in a separate process and get weights from a scheme. An `Evaluator` updates its process before each "
        "evaluation. Each frame is checked against its version. torchrl has no TCP: its queues stand beside.",
        left_out=("environment", "parameters", "wanted", "ok"),
    ),
    Section(
        "start",
        "The first batch",
        "start --rounds 5",
        "A program that makes one collector after the other, of two workers with 8 CartPoles each. The limit "
        "of the first one is a process that imports torch, tensordict and Gymnasium.",
    ),
    Section(
        "serving",
        "Requests beside updates",
        "serving --rounds 5 --seconds 8",
        "A web server (uvicorn) with a policy of 50 MiB, a trainer that sends it without a pause, and a "
        "process with eight clients, on the same two cores. Otherwise, as usual, the trainer posts "
        "what `torch.save` writes, and the server loads it under a lock.",
        "A request waits for the processors: at full speed four threads want two of them. With "
        "`max_receive_rate` the server reads 50 MB per second of the trainer's updates at most. The trainer "
        "still sends one after the other.",
    ),
    Section(
        "cuda",
        "From and to a GPU",
        "cuda --rounds 9 --models tiny,medium",
        "`SharedMemWeightSyncScheme`, with the trainer's model and the workers' on a GPU or not. The limit "
        "is one copy of all bytes on the device, or from or to pinned memory; *state dict* is `{name: "
        "tensor.to(device)}`. Torn reads: the trainer changes its weights in a stream of its own, and "
        "workers queue reads of the model in theirs, without waiting for them.",
        "A device does later what a call queues. So the trainer waits until its device has computed the "
        "weights, and a worker answers when nothing that it has queued can read the version before. The "
        "event loop asks each of torch's streams whether it is idle; a thread waits for one that is not. "
        "The table was measured when 65 streams were asked, which took 0.14 to 0.2 ms on either side. Since "
        "then those of the two highest priorities are asked too, 129 in all on this GPU: a send from or to "
        "it takes longer now than the table says, by up to 0.2 ms on either side if those streams take as "
        "long. That has not been measured. A copy from or to the device is queued by the event loop. Before "
        "2026-11-28 threads always waited: from GPU to GPU the tiny model took 2.24 ms then, and the medium "
        "one 2.19 ms (one worker, the same kind of GPU). What is not in the table, for lack of time on that "
        "machine, was measured on 2026-11-26: 1 GiB took 5.2 ms from GPU to GPU, and 26.3 ms from the GPU "
        "to the CPU, with limits of 0.78 and 19.6 ms.\n\n"
        "NCCL was run on one GPU only, with each process as a host of its own (`pytest "
        "tests/transports/test_nccl.py`), so there are no figures of its speed. What a suspended worker does "
        "to the others there, 48 MiB and three workers: the trainer's own work on the GPU waited 59.5 s for "
        "it before its transfers had a stream of their own, and does not wait now; the other workers of a "
        "broadcast did not get the version within 30 s before, and get it after 11 s now; to each alone, "
        "they get it after 0.5 s.",
        needs_gpu=True,
    ),
    Section(
        "blocking",
        "What a blocking call costs",
        "blocking",
        "The blocking twin's call beside the coroutine that it runs, in one process.",
    ),
    Section(
        "relay",
        "A tree of relays",
        "relay",
        "A trainer, two relays and eight workers, beside eight workers at the trainer itself. Each link has "
        "1 Gbit/s.",
    ),
    Section(
        "delta",
        "Bytes per update",
        "delta",
        "A transformer of 3.4 million parameters that learns with AdamW. After each step the weights go to a "
        "worker over TCP and are compared bit by bit.",
    ),
)

CHARTS = (
    Chart(
        "benchmarks-front",
        "Times faster than torchrl, on two cores",
        "Horizontal bars: how many times faster than torchrl aiosync is.",
        (
            Bars("send", "100 MB to {workers} processes, {scheme}", "vs aiosync",
                 {"contender": "torchrl", "model": "medium", "mode": "plain", "workers": 4}),
            Bars("send", "80 KB to {workers} processes, {scheme}", "vs aiosync",
                 {"contender": "torchrl", "model": "tiny", "mode": "plain", "workers": 4}),
            Bars("distributed-apart", "{model} to {workers} ranks, {scheme}", "times", {"workers": 2}),
            Bars("collectors", "{environment}, {collector}, frames/s", "times better",
                 {"figure": "frames/s"}),
        ),
        logarithmic=True,
        on_page=False,
    ),
    Chart(
        "benchmarks-torchrl",
        "Times faster than torchrl",
        "Horizontal bars: how many times faster than torchrl's scheme of the same name a send is.",
        (
            Bars("send", "{model}, {scheme} {mode}, {workers} w.", "vs aiosync", {"contender": "torchrl"}),
            Bars("distributed", "{model}, {scheme}, {workers} w.", "times"),
            Bars("distributed-apart", "{model}, {scheme} apart, {workers} w.", "times"),
            Bars("ray", "{model}, Ray {actors of}, {count} w.", "times"),
            Bars("collectors", "{environment}, {collector}, frames", "times better", {"figure": "frames/s"}),
        ),
        logarithmic=True,
    ),
    Chart(
        "benchmarks-limit",
        "Share of the limit",
        "Horizontal bars: the limit's time divided by aiosync's, or aiosync's frames by the loops'.",
        (
            Bars("send", "{model}, shared, {workers} w. / memcpy", "vs aiosync",
                 {"contender": "memcpy", "scheme": "shared", "model": "medium"}),
            Bars("send", "{model}, shared, {workers} w. / memcpy", "vs aiosync",
                 {"contender": "memcpy", "scheme": "shared", "model": "large"}),
            Bars("network", "{MiB} MiB, {link}, {workers} w. / blocking socket", "ratio"),
            Bars("distributed-apart", "{model}, {scheme} apart / gloo", "of gloo", {"workers": 1}),
            Bars("collectors-plain", "{environment}, single / plain loop", "times the plain loop",
                 {"collector": "single"}),
            Bars("collectors-plain", "{environment}, {collector} / two plain loops", "of two at a time"),
        ),
    ),
)  # fmt: skip
