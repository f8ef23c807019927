"""Shared by all tests: the repository root on sys.path, the handed data, small helpers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))

# One thread, here and in started scripts: on models this small a second one only gets in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup, or behind an `&`, these are ignored, by every program that is started here as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A model and rows so small that a whole run takes a second.
TINY_RUN = ("--dim", 32, "--n_layers", 2, "--n_heads", 4, "--max_seq_len", 48,
            "--device", "cpu", "--dtype", "float32", "--num_workers", 0, "--warmup_steps", 0,
            "--log_interval", 1, "--optimizer", "adamw")
WORDS = "the fox found a well and drank, then it slept under an old tree near 我们 的 小 河".split()


@pytest.fixture(scope="session")
def tokenizer():
    """The shipped tokenizer."""
    from dataset.tokenizer import Tokenizer

    return Tokenizer()


@pytest.fixture
def write_jsonl(tmp_path):
    """write_jsonl(name, records or raw bytes) -> path."""
    def write(name, records):
        path = tmp_path / name
        if isinstance(records, bytes):
            path.write_bytes(records)
        else:
            lines = [json.dumps(record, ensure_ascii=False) for record in records]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def run_script(tmp_path):
    """run_script("trainer/x.py", "--flag", ...) -> CompletedProcess, run in a folder of its own."""
    def run(script, *arguments, timeout=240, **options):
        command = [sys.executable, str(ROOT / script), *map(str, arguments)]
        options.setdefault("cwd", tmp_path)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)

    return run


@pytest.fixture
def shared():
    """The folder of handed data; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not there (developers' data)")
    return SHARED


@pytest.fixture
def cache_dir(tmp_path):
    """A folder for token caches of the test's own."""
    return tmp_path / "cache"


@pytest.fixture
def corpus(write_jsonl):
    """A pretraining file of forty texts, `cache_checks.TEXTS`."""
    from cache_checks import TEXTS

    return write_jsonl("corpus.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def builds(monkeypatch):
    """A list that grows by one with every building of a token cache."""
    from dataset import token_cache

    calls, build = [], token_cache.build

    def counted(path, *arguments):
        calls.append(path)
        return build(path, *arguments)

    monkeypatch.setattr(token_cache, "build", counted)
    return calls


def texts(count, seed=0):
    """Records of texts of 3 to 40 words."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return [{"text": " ".join(rng.choice(WORDS, rng.integers(3, 40)))} for _ in range(count)]


def save_model(path, model, about):
    """A weight file of a model as it is."""
    from model.weights import save_weights

    save_weights(path, model.config, model.state_dict(), about)


@pytest.fixture
def signals():
    """Puts the handlers of this process back after a run that took them over."""
    before = {number: signal.getsignal(number)
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def train(tmp_path, monkeypatch, signals):
    """train(script module, flags) runs its main() in this process; returns rows of the log."""
    from model.weights import read_state

    def run(script, *flags, name="run"):
        out = tmp_path / "out"
        argv = ["train", *TINY_RUN, "--out_dir", out, "--save_weight", name, "--cache_dir",
                tmp_path / "cache", *flags]
        monkeypatch.setattr(sys, "argv", [str(part) for part in argv])
        script.main()
        lines = (out / f"{name}_32_metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], read_state(out / f"{name}_32.pth")

    return run


@pytest.fixture
def runs(tmp_path, monkeypatch, signals):
    """Launches of the stage scripts in this process that die where they are told to."""
    from resume_checks import Runs

    return Runs(tmp_path, monkeypatch)


@pytest.fixture
def data(tmp_path):
    """The flags of a small training and validation file."""
    from resume_checks import data_flags

    return data_flags(tmp_path)
