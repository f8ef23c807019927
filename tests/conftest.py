"""Shared by all tests: the repository root on sys.path, the handed data, small helpers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))


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
