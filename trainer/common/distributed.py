"""The processes of a run, as one small value; a single process is a world of one.

    torchrun --nproc_per_node 8 train_pretrain.py          one process for each GPU
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 \\
        --rdzv_backend c10d --rdzv_endpoint HOST:29500 train_pretrain.py       on each machine

Gradients travel over NCCL between GPUs and over gloo elsewhere; numbers and small objects always
over gloo, so that no message between hosts has to wait for a GPU.
"""

import datetime
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from model.device import DeviceError, choose_device

START_SECONDS = 120  # that the processes have to find each other
STEP_MINUTES = 30  # that one process waits for another, once they are at work
NCCL_MINUTES = 5  # the same for a GPU, which nothing else would wake when a machine is lost
FAILED = "failed"  # the store's key for the message of a process that ends with an error
LAST_WORDS_SECONDS = 2  # that rank 0 stays for others that fail with it
DATA_HOURS = 12  # that one machine may take longer than another to tokenise its copy of the data


class ProcessError(RuntimeError):
    """The processes cannot find each other, or one was lost, or they disagree on something."""


def is_first_to_say(message: str) -> bool:
    """True for one of the processes that are about to print the same message."""
    if not torch_dist.is_initialized():  # no way to ask: better twice than not at all
        return True
    try:
        store = torch_dist.distributed_c10d._get_default_store()
        store.set(FAILED, message)
        is_first = store.add(f"said/{message}", 1) == 1
        if torch_dist.get_rank() == 0:  # it may keep the store, which the others have to ask, too
            patience = time.monotonic() + LAST_WORDS_SECONDS
            while store.add(f"said/{message}", 0) < torch_dist.get_world_size() \
                    and time.monotonic() < patience:
                time.sleep(0.02)
        return is_first
    except RuntimeError:  # its keeper is gone
        return True


def is_a_lost_process(error: Exception) -> bool:
    """True for what gloo and NCCL raise when another process has gone."""
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe",
             "timed out", "timeout")
    return isinstance(error, torch_dist.DistError) or (
        "gloo" in str(error) and any(sign in str(error).lower() for sign in signs))


@dataclass(frozen=True)
class Dist:
    """Who this process is, and how it talks with the others.

    In a world of one every call returns what it was given. In a larger one it returns the same on
    all processes, and all have to make it. Raises ProcessError where that does not come about.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    host_group: Any = None  # gloo
    local_world_size: int = 1  # processes on this machine
    restarted: bool = False  # any of them by torchrun: processes were lost, machines came or left

    @property
    def is_main(self) -> bool:
        """True for the one process that prints and writes."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The sum of each number over all processes (exact for integers below 2^53)."""
        return self.reduce(values, torch_dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """The largest of each number over all processes."""
        return self.reduce(values, torch_dist.ReduceOp.MAX)

    def reduce(self, values: tuple[float, ...], operation) -> list[float]:
        if self.world_size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        torch_dist.all_reduce(numbers, operation, group=self.host_group)
        # By the result, which is the same everywhere, and not by what this process gave.
        return [int(number) if number.is_integer() else number for number in numbers.tolist()]

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor on the device over all processes; the host does not wait for it."""
        if self.world_size > 1:
            torch_dist.all_reduce(tensor)
        return tensor

    def gather(self, value: object) -> list:
        """What every process gave, by rank."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch_dist.all_gather_object(values, value, group=self.host_group)
        return values

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What make() returns or raises on the main process, the only one that calls it."""
        if self.world_size == 1:
            return make()
        outcome = [None, None]
        if self.is_main:
            try:
                outcome = [make(), None]
            except Exception as error:
                outcome = [None, error]
        torch_dist.broadcast_object_list(outcome, src=0, group=self.host_group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def agree(self, name: str, value: str) -> None:
        """Waits for all processes, however long one has been busy, and raises ProcessError if they
        do not all give the same value.
        """
        if self.world_size == 1:
            return
        # Keys in the store, not a collective: a collective gives up after minutes.
        store = torch_dist.distributed_c10d._get_default_store()
        store.set(f"{name}/{self.rank}", value)
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        patience = time.monotonic() + 3600 * DATA_HOURS
        while not store.check(keys):
            if store.check([FAILED]):
                raise ProcessError(f"another process ended: {store.get(FAILED).decode()}")
            if time.monotonic() > patience:
                raise ProcessError(f"the other processes were not ready in {DATA_HOURS} hours")
            time.sleep(0.05)
        given = [store.get(key).decode() for key in keys]
        if len(set(given)) > 1:
            differing = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(given))
            raise ProcessError(f"the processes do not have the same {name}: {differing}")

    def finish(self) -> None:
        """Ends the process group after a run that went well (never call it after an error: others
        may be waiting for this process in a call of their own, which would then wait for ever).
        """
        if torch_dist.is_initialized():
            torch_dist.barrier(group=self.host_group)
            torch_dist.destroy_process_group()


def start_distributed(device_name: str, needs_group: bool = False) -> Dist:
    """Reads the launcher's environment (torchrun, deepspeed) and meets the other processes.

    needs_group: make the process groups for a single process too, as DeepSpeed wants them.

    Raises DeviceError for a device that is not there and ProcessError if the others do not come.
    From here on only the main process prints to standard output.
    """
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and ":" in device_name:
        raise DeviceError(f"--device {device_name} with {world_size} processes: expected cuda, of "
                          "which each process takes its own")
    device = choose_device(device_name, local_rank)
    if world_size > 1 and device.type == "mps":  # gloo cannot add up its tensors
        device = torch.device("cpu")
    restarted = was_started_before(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or helpers would open a context on GPU 0 as well
    if world_size == 1:
        if needs_group:
            torch_dist.init_process_group(backend_for(device), store=torch_dist.HashStore(),
                                          rank=0, world_size=1)
        return Dist(rank, local_rank, world_size, device, restarted=restarted)
    host_group = meet(device)
    if rank > 0:
        sys.stdout = open(os.devnull, "w")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    dist = Dist(rank, local_rank, world_size, device, host_group, local_world_size)
    # A machine that joins a running job has restarted nothing, but may well be given rank 0.
    return replace(dist, restarted=dist.max(restarted) == [True])


def was_started_before(local_rank: int) -> bool:
    """True if our torchrun agent has started a process in this one's place before.

    It counts only the starts that follow an error; not those because another machine came or left.
    So each process leaves a note in the folder that every launch of an agent makes for itself.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        return True
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if attempt.name != "attempt_0":  # FOLDER/attempt_0/LOCAL_RANK/error.json; another launcher
        return False
    try:
        (attempt.parent / f"started_{local_rank}").touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # a full disk, say: not known, so not claimed
        pass
    return False


def backend_for(device: torch.device) -> str:
    """NCCL between GPUs, gloo elsewhere (and on Windows, which has no NCCL)."""
    return "nccl" if device.type == "cuda" and torch_dist.is_nccl_available() else "gloo"


def find_start(store: Store, rank: int, world_size: int, seconds: datetime.timedelta) -> str:
    """The number of this start, 1, 2, ..., once all processes are there and know it.

    torchrun keeps one store for all starts of a job, where those who were lost have left addresses
    that nobody answers at. So rank 0 counts the starts, and tells the number to whoever says hello;
    of those who got it, only the living say that they are here.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", name)
        store.wait([f"start of/{name}"], seconds)
    start = store.get(f"start of/{name}").decode() if rank > 0 else str(store.add("starts", 1))
    here = {other: f"here/{start}/{other}" for other in range(world_size)}
    store.set(here[rank], "")
    patience = time.monotonic() + seconds.total_seconds()
    while rank == 0 and time.monotonic() < patience and not store.check(list(here.values())):
        for other in range(1, world_size):
            if store.check([f"hello/{other}"]):
                store.set(f"start of/{store.get(f'hello/{other}').decode()}", start)
        time.sleep(0.02)
    store.wait(list(here.values()), seconds if rank > 0 else datetime.timedelta(seconds=1))
    return start


def meet(device: torch.device) -> Any:
    """Makes the process groups; returns the one over gloo."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    seconds = datetime.timedelta(seconds=START_SECONDS)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=seconds))
        start = find_start(store, rank, world_size, seconds)
        backend = backend_for(device)
        minutes = NCCL_MINUTES if backend == "nccl" else STEP_MINUTES
        torch_dist.init_process_group(
            backend, store=PrefixStore(f"start {start}", store), rank=rank, world_size=world_size,
            timeout=datetime.timedelta(minutes=minutes))
        minutes = datetime.timedelta(minutes=STEP_MINUTES)
        return torch_dist.new_group(backend="gloo", timeout=minutes)
    except (RuntimeError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ProcessError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not meet the "
            f"others at {address} within {START_SECONDS} s ({first_line}). Were all processes "
            "started (torchrun does)? Is the address that of the first machine, the port free and "
            "not blocked? With several network cards, or where a machine's own name means "
            "127.0.0.1, name the right one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (`ip addr` "
            "lists them), and give torchrun --local_addr."
        ) from None
