"""How much memory a step takes, and how much there is: on a GPU, or of this process on a CPU.

Judged is what falls when the micro-batch falls. On CUDA: the peak of allocated bytes, and what
others have on the card. On a CPU: this process's own (anonymous) memory, which does not count the
token files that the system keeps cached for us, against the machine's or the container's limit.
"""

import os
import threading
import time
import weakref
from pathlib import Path

import torch

SAMPLE_SECONDS = 0.02  # between two looks at a CPU's memory, whose peak the system does not keep


class CudaGauge:
    """Peak of a step on one GPU, in bytes."""

    def __init__(self, device: torch.device, limit_gb: float):
        self.device, self.looked_at, self.seen = device, 0.0, 0
        total = torch.cuda.get_device_properties(device).total_memory
        self.limit = limit_gb * 2**30 or total

    def start(self) -> None:
        """A step, or a probe, begins."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.base = torch.cuda.memory_allocated(self.device) + self.others()

    def others(self) -> int:
        """Bytes on the card that are not ours: other processes, the driver's contexts.

        Asking the driver takes a while; once a second is enough.
        """
        if time.monotonic() > self.looked_at + 1:
            free, total = torch.cuda.mem_get_info(self.device)
            self.seen = max(total - free - torch.cuda.memory_reserved(self.device), 0)
            self.looked_at = time.monotonic()
        return self.seen

    def peak(self) -> float:
        """The most since `start`."""
        return torch.cuda.max_memory_allocated(self.device) + self.others()

    def free(self) -> None:
        """Gives back what the allocator keeps for later."""
        torch.cuda.empty_cache()


class HostGauge:
    """Peak of a step in main memory, in bytes, seen by looking often."""

    def __init__(self, limit_gb: float, processes: int):
        self.limit = (limit_gb * 2**30 or machine_limit()) / processes
        self.lock = threading.Lock()  # a look that began before a step is not to count in it
        self.start()
        threading.Thread(target=watch, args=(weakref.ref(self),), daemon=True).start()

    def start(self) -> None:
        with self.lock:
            self.base = self.highest = anonymous_bytes()

    def peak(self) -> float:
        with self.lock:
            self.highest = max(self.highest, anonymous_bytes())
            return self.highest

    def free(self) -> None:
        pass


def watch(gauge: weakref.ref) -> None:
    """Runs in a thread as long as there is the gauge: many runs in one process leave no threads."""
    while (living := gauge()) is not None:
        living.peak()
        del living
        time.sleep(SAMPLE_SECONDS)


class MpsGauge:
    """What Apple's driver holds at present; it keeps no peak."""

    def __init__(self, limit_gb: float):
        self.limit = limit_gb * 2**30 or torch.mps.recommended_max_memory()
        self.base = 0

    def start(self) -> None:
        self.base = torch.mps.current_allocated_memory()

    def peak(self) -> float:
        return torch.mps.driver_allocated_memory()

    def free(self) -> None:
        torch.mps.empty_cache()


def make_gauge(device: torch.device, limit_gb: float, local_processes: int):
    """The gauge of a device; limit_gb in GiB, 0 = what the device or the machine has."""
    if device.type == "cuda":
        return CudaGauge(device, limit_gb)
    if device.type == "mps":
        return MpsGauge(limit_gb)
    return HostGauge(limit_gb, local_processes)


def anonymous_bytes() -> int:
    """This process's own memory: resident, less what is backed by files. 0 where unknown."""
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:  # not Linux: the guard then only meets errors, and does not foresee them
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def machine_limit() -> float:
    """Bytes that this process may come to: the container's limit, or the machine's memory."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        pass
    return min(limits, default=float("inf"))
