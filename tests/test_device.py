"""Device and number format: what `auto` takes, and that nothing else than it was told is used."""

import pytest
import torch

from model import device as device_module
from model.device import (
    DeviceError,
    autocast,
    choose_device,
    choose_dtype,
    cpu_has_bfloat16,
    describe,
)


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=GPUs, mps=bool): pretends to be that machine."""
    def pretend(cuda=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(("cuda", "mps", "expected"), [
    (1, True, "cuda:0"), (1, False, "cuda:0"), (0, True, "mps"), (0, False, "cpu"),
])
def test_auto_takes_cuda_then_mps_then_cpu(machine, cuda, mps, expected):
    """A61, A62: `auto` takes the best device there is, in the documented order."""
    machine(cuda, mps)
    assert str(choose_device("auto")) == expected
    assert str(choose_device("cpu")) == "cpu"


def test_each_process_takes_its_own_gpu(machine):
    """Process i of a machine takes GPU i, unless a GPU is named."""
    machine(cuda=4)
    assert str(choose_device("auto", local_rank=2)) == "cuda:2"
    assert str(choose_device("cuda", local_rank=3)) == "cuda:3"
    assert str(choose_device("cuda:1", local_rank=3)) == "cuda:1"


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "tpu", "", "CPU", "gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_named(machine, name):
    """A62, P6: never a silent fall-back to the CPU; the message says what came and what is
    there.
    """
    machine()
    with pytest.raises(DeviceError) as caught:
        choose_device(name)
    assert f"--device {name}:" in str(caught.value)
    assert "cpu" in str(caught.value)


@pytest.mark.parametrize("name", ["cuda:2", "cuda:99"])
def test_a_gpu_beyond_the_last_is_refused(machine, name):
    """P6: the third GPU of two is refused at once, with the number there is."""
    machine(cuda=2)
    with pytest.raises(DeviceError, match="2 GPU"):
        choose_device(name)


@pytest.mark.parametrize(("device", "native", "expected"), [
    ("cuda", True, torch.float16), ("cuda", False, torch.float16), ("cpu", True, torch.bfloat16),
    ("cpu", False, torch.float32), ("mps", True, torch.float32),
])
def test_auto_dtype(monkeypatch, device, native, expected):
    """`--dtype auto`: float16 on CUDA, bfloat16 on a CPU with instructions for it, else float32."""
    monkeypatch.setattr(device_module, "cpu_has_bfloat16", lambda: native)
    assert choose_dtype("auto", torch.device(device)) == expected


def test_a_named_dtype_is_taken_literally():
    """A08: float32 stays float32 on every device; a name that is none is refused."""
    for device in (torch.device("cpu"), torch.device("cuda")):
        for name in ("float16", "bfloat16", "float32"):
            assert choose_dtype(name, device) == getattr(torch, name)
    with pytest.raises((KeyError, ValueError)):
        choose_dtype("fp16", torch.device("cpu"))


@pytest.mark.parametrize(("found", "expected"), [
    ({"avx2": True}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True),
    ({"bf16": True}, True), ({"avx512_bf16": False, "amx_bf16": False}, False),
])
def test_native_bfloat16_is_read_from_the_processor(monkeypatch, found, expected):
    """Only instructions for bfloat16 products count; plain AVX2 would emulate them slowly."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert cpu_has_bfloat16() is expected


@pytest.mark.parametrize("has", [True, False])
def test_native_bfloat16_on_an_older_torch(monkeypatch, has):
    """torch 2.9 may lack get_capabilities: the older calls answer instead."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert cpu_has_bfloat16() is has


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_the_chosen_dtype(dtype):
    """A08: matrix products have exactly the chosen format; float32 means no autocast."""
    a = torch.randn(4, 4)
    with autocast(torch.device("cpu"), dtype):
        assert (a @ a).dtype == dtype
    assert (a @ a).dtype == torch.float32


def test_describe_names_the_device():
    """A62: what is printed names the CPU and its threads."""
    assert describe(torch.device("cpu")) == f"cpu ({torch.get_num_threads()} threads)"
    assert describe(torch.device("mps")) == "mps"
