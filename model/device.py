"""Which device, which number format: decided in one place for training and for evaluation."""

import contextlib

import torch


class DeviceError(ValueError):
    """The device that was asked for is not there; the message says what is."""


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` takes cuda, then mps, then cpu. Raises DeviceError for a device that is not there."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    kind = name.split(":")[0]
    if not available.get(kind, False):
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise DeviceError(
            f"--device {name}: not available here (this machine and this build of torch have: "
            f"{there}). Take one of those or `auto`; README says how to pick a torch build."
        )
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    except RuntimeError as error:
        raise DeviceError(f"--device {name}: {error}") from None
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: this machine has {torch.cuda.device_count()} GPU(s)")
    return device


def cpu_has_bfloat16() -> bool:
    """True if the processor multiplies bfloat16 natively (AVX512-BF16, AMX, or ARM's BF16).

    Without such instructions bfloat16 on a CPU is emulated, several times slower than float32.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return any(found.get(key, False) for key in ("avx512_bf16", "amx_bf16", "bf16"))
    # Older releases have only these calls.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check)() for check in checks if hasattr(torch.cpu, check))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float16 on CUDA, bfloat16 on a CPU that has it natively, else float32."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.float16
    if device.type == "cpu" and cpu_has_bfloat16():
        return torch.bfloat16
    return torch.float32


def autocast(device: torch.device, dtype: torch.dtype):
    """Context in which matrix products run in dtype; float32 means no autocast at all."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def describe(device: torch.device) -> str:
    """The device as a person would name it, e.g. `cuda:0 (NVIDIA GeForce RTX 3090)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return str(device)
