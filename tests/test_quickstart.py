"""scripts/quickstart.sh and scripts/download_data.py, as a newcomer meets them."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT

from scripts.download_data import download


@pytest.mark.slow
def test_quickstart_runs_and_reuses(tmp_path):
    """The whole chain on a tiny shape in a copy of the repository: the score is the last line, a
    second run trains nothing again, weights in out/ are left alone; flags that would
    send results elsewhere, or end a training unfinished, are refused.
    """
    copy = tmp_path / "repository"
    skipped = shutil.ignore_patterns(".venv", ".git", "out", ".cache", "raw", "*.jsonl",
                                     "__pycache__")
    shutil.copytree(ROOT, copy, ignore=skipped)
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "TQDM_DISABLE": "1"}
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    # An environment that is there already, so that the test installs nothing.
    python = bin_folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] && exit 0\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command = ["bash", "scripts/quickstart.sh", "--dim", "32", "--n_layers", "1", "--n_heads", "4",
               "--max_steps", "2", "--device", "cpu"]

    mine = copy / "out" / "pretrain_32.pth"
    mine.parent.mkdir()
    mine.write_bytes(b"somebody's own training")
    first = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True,
                           timeout=280)
    assert first.returncode == 0, first.stdout + first.stderr
    last_line = first.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        r"score: \d+\.\d % \(\d+ questions, arithmetic apart: \d+\.\d %\)", last_line)

    second = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True,
                            timeout=280)
    assert second.stdout.strip().splitlines()[-1] == last_line
    assert "step 2/2" in first.stdout and "step 2/2" not in second.stdout

    assert mine.read_bytes() == b"somebody's own training"
    for flag in ("--out_dir", "--max_minutes"):
        refused = subprocess.run([*command, flag, "1"], cwd=copy, env=environment,
                                 capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2 and flag in refused.stderr


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves `content`; breaks the first connection off half-way."""

    content = b"{" + bytes(range(256)) * 5000
    requests: list[str | None] = []  # noqa: RUF012

    def do_GET(self):
        asked = self.headers.get("Range")
        self.requests.append(asked)
        start = int(asked.split("=")[1].split("-")[0]) if asked else 0
        if start >= len(self.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.content)}")
            self.end_headers()
            return
        self.send_response(206 if asked else 200)
        body = self.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if len(self.requests) == 1 else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server_url():
    RangeHandler.requests.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/data.jsonl"
    server.shutdown()


def test_download_goes_on_where_it_stopped(server_url, tmp_path):
    """A broken download keeps its part under another name, and the next one asks for the rest."""
    path = tmp_path / "data.jsonl"
    with pytest.raises(OSError):
        download(server_url, path, timeout=5)
    assert not path.exists() and Path(f"{path}.part").stat().st_size > 0
    download(server_url, path, timeout=5)
    assert path.read_bytes() == RangeHandler.content
    assert RangeHandler.requests[1] == f"bytes={len(RangeHandler.content) // 2}-"


def test_download_whose_last_byte_was_there(server_url, tmp_path):
    """A part that is complete becomes the file, though the server has nothing left to send."""
    path = tmp_path / "data.jsonl"
    Path(f"{path}.part").write_bytes(RangeHandler.content)
    download(server_url, path, timeout=5)
    assert path.read_bytes() == RangeHandler.content
    longer = tmp_path / "longer.jsonl"
    Path(f"{longer}.part").write_bytes(RangeHandler.content + b"of another file")
    with pytest.raises(OSError):
        download(server_url, longer, timeout=5)
    assert not longer.exists()
