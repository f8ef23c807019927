"""The processes of a run, as one small value; a single process is a world of one."""

import os
from dataclasses import dataclass

import torch

from model.device import DeviceError, choose_device


@dataclass(frozen=True)
class Dist:
    """Who this process is, and how it talks with the others.

    In a world of one every call returns what it was given. All others must make the same call.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True for the one process that prints and writes."""
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum of a number over all processes."""
        return value

    def max(self, value: float) -> float:
        """The largest of a number over all processes."""
        return value

    def gather(self, value: object) -> list:
        """What every process gave, by rank; on the main process (others: an empty list)."""
        return [value]


def start_distributed(device_name: str) -> Dist:
    """Reads the launcher's environment (torchrun, deepspeed) and picks the device.

    Raises DeviceError for a device that is not there, and for more than one process.
    """
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        raise DeviceError(f"WORLD_SIZE={world_size}: training on several processes is not here "
                          "yet; launch with --nproc_per_node=1")
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or helpers would open a context on GPU 0 as well
    return Dist(rank, local_rank, world_size, device)
