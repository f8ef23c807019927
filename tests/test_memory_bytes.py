"""How much memory a step takes: predicted, measured, capped, and constant over a run."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, texts

from model.LMConfig import LMConfig
from model.memory import predicted_bytes
from model.transformer import MiniMindLM
from scripts.memory_table import measured_bytes
from trainer.common.memory_gauge import HostGauge, anonymous_bytes

MIB = 2**20


@pytest.mark.parametrize("shape", [
    (LMConfig(dim=128, n_layers=4, n_heads=4, vocab_size=900), 4, 256),
    (LMConfig(dim=192, n_layers=3, vocab_size=900), 8, 128),
    (LMConfig(dim=128, n_layers=2, vocab_size=6400), 8, 128),  # logits dominate
], ids=["4x256", "8x128", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_prediction(shape, dtype, checkpointing):
    """The formulae are within 15 % of what the tensors of a step really take."""
    predicted = predicted_bytes(*shape, dtype, checkpointing)["all"]
    measured = measured_bytes(*shape, dtype, checkpointing, device=torch.device("cpu"))
    print(f"{predicted / MIB:.1f} {measured / MIB:.1f} {predicted / measured - 1:+.1%}")
    assert predicted == pytest.approx(measured, rel=0.15)


def test_prediction_of_the_weights_copies():
    """On few positions, with checkpointing, the 16-bit copies are most of what is added: all of
    them are there while the loss has its logits, not those of one block.
    """
    shape = LMConfig(dim=256, n_layers=8, vocab_size=900), 1, 64, torch.bfloat16, True
    measured = measured_bytes(*shape, device=torch.device("cpu"))
    assert predicted_bytes(*shape)["all"] == pytest.approx(measured, rel=0.05)


def test_number_of_parameters():
    """The config's formula is the model's count: 25,829,888 by default."""
    assert LMConfig().num_parameters == 25_829_888
    for config in LMConfig(), LMConfig(dim=96, n_layers=3, n_heads=6, n_kv_heads=3, vocab_size=77):
        assert config.num_parameters == MiniMindLM(config).num_parameters()


def test_the_gauge_sees_a_peak():
    """Memory that was taken and given back within a step counts in it, and not in the next one."""
    gauge = HostGauge(limit_gb=2, processes=4)
    assert gauge.limit == 2**29
    gauge.start()
    taken = torch.ones(100 * MIB, dtype=torch.uint8)
    while gauge.highest - gauge.base < 90 * MIB:
        pass  # until the thread has looked
    del taken
    assert gauge.peak() - gauge.base > 90 * MIB
    gauge.start()
    assert gauge.peak() - gauge.base < 50 * MIB


# --- Under a cap

CAPPED = """
import resource, runpy, sys
import torch
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from trainer import train_pretrain
from trainer.common import memory
from trainer.common.memory_gauge import HostGauge, anonymous_bytes
room = int(sys.argv[3])
if room < 0:
    memory.make_gauge = lambda *_: HostGauge((anonymous_bytes() - room * 2**20) / 2**30, 1)
if room > 0:
    data = [int(line.split()[1]) for line in open("/proc/self/status") if "VmData" in line][0]
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + room * 2**20,) * 2)
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def capped_run(tmp_path_factory):
    """capped_run(name, room, flags) -> (losses and norms, lines of the guard): steps of 16 rows of
    256, whose activations take 330 MiB, with room (MiB, 0 = without end) for what comes on top.
    Below 0: nothing is refused, but the guard is told of a limit so far above what there is then.
    """
    folder = tmp_path_factory.mktemp("capped")
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in texts(640)))

    def run(name, room, *flags):
        command = [sys.executable, "-c", CAPPED, ROOT, ROOT / "tests", room,
                   ROOT / "trainer/train_pretrain.py", "--data_path", path, "--dim", 128,
                   "--n_layers", 4, "--n_heads", 4, "--max_seq_len", 256, "--batch_size", 16,
                   "--accumulation_steps", 1, "--max_steps", 2, "--log_interval", 1, "--device",
                   "cpu", "--dtype", "float32", "--num_workers", 0, "--warmup_steps", 0,
                   "--out_dir", folder / "out", "--cache_dir", folder / "cache", "--save_weight",
                   name, *flags]
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120,
                               env={**os.environ, "OMP_NUM_THREADS": "1",
                                    # Freed memory goes back to the system at once.
                                    "MALLOC_MMAP_THRESHOLD_": "65536"})
        print(ended.stdout, ended.stderr)
        assert ended.returncode == 0
        [log] = (folder / "out").glob(f"{name}_*_metrics.jsonl")
        figures = [(row["loss"], row["grad_norm"]) for row in map(json.loads, log.open())]
        return figures, [line for line in ended.stdout.splitlines() if line.startswith("memory:")]

    return run


@pytest.fixture(scope="module")
def uncapped(capped_run):
    figures, lines = capped_run("plain", 0)
    assert len(figures) == 2 and not lines
    return figures


@pytest.mark.slow
def test_a_run_under_a_cap(capped_run, uncapped):
    """The system refuses what 16 rows need: the run completes with the same losses, in smaller
    micro-batches.
    """
    figures, lines = capped_run("capped", 300)
    assert len(lines) == 1 and "out of memory" in lines[0]
    assert [number for pair in figures for number in pair] == pytest.approx(
        [number for pair in uncapped for number in pair], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_keeps_below_a_limit(capped_run, uncapped):
    """The guard, told of a limit, acts before anything is refused; the losses are the same."""
    figures, lines = capped_run("limited", 0, "--memory_limit_gb", 0.5)
    assert lines and "of 0.5 GiB" in lines[0] and "out of memory" not in "".join(lines)
    assert [number for pair in figures for number in pair] == pytest.approx(
        [number for pair in uncapped for number in pair], rel=1e-5)


@pytest.mark.slow
def test_a_peak_that_the_probe_did_not_foresee(capped_run):
    """The first step, which takes 85 MiB, comes above a limit 40 MiB over what the process has: the
    next one has smaller micro-batches, nothing is refused, and the losses are the same.
    """
    small = ("--dim", 64, "--n_layers", 2, "--memory_fraction", 1)
    plain, lines = capped_run("small", 0, *small)
    assert not lines
    figures, lines = capped_run("above", -40, *small)
    assert len(lines) == 1 and "step 1: " in lines[0] and "above 100%" in lines[0]
    assert [number for pair in figures for number in pair] == pytest.approx(
        [number for pair in plain for number in pair], rel=1e-5)


@pytest.mark.slow
def test_flat_memory(train, write_jsonl, monkeypatch):
    """From step 50 to step 2,000 this process's own memory does not grow."""
    from trainer import train_pretrain
    from trainer.common.memory import MemoryGuard

    path, after, seen = write_jsonl("data.jsonl", texts(200)), MemoryGuard.after, {}

    def noted(guard, step):
        after(guard, step)
        if step + 1 in (50, 1000, 2000):
            seen[step + 1] = anonymous_bytes()

    monkeypatch.setattr(MemoryGuard, "after", noted)
    train(train_pretrain, "--data_path", path, "--batch_size", 2, "--accumulation_steps", 2,
          "--epochs", 1000, "--max_steps", 2000, "--log_interval", 100, "--save_interval", 500)
    print(seen)
    assert seen[2000] - seen[50] < 8 * MIB
