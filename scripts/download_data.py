"""Downloads MiniMind's published data files into `dataset/`.

    python scripts/download_data.py                         pretrain_hq.jsonl and sft_mini_512.jsonl
    python scripts/download_data.py --source modelscope     from ModelScope, faster in China

A download that was interrupted goes on where it stopped; a finished file is left alone. Only data
is fetched, and nothing of it is executed.
"""

import argparse
import http.client
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

DATASET = Path(__file__).resolve().parents[1] / "dataset"
SOURCES = {
    "huggingface": "https://huggingface.co/datasets/jingyaogong/minimind_dataset/resolve/main/",
    "modelscope": "https://www.modelscope.cn/datasets/gongjy/minimind_dataset/resolve/master/",
}
FILES = ("pretrain_hq.jsonl", "sft_mini_512.jsonl")  # 1.6 GB and 1.2 GB
BLOCK = 1 << 20  # bytes


def download(url: str, path: Path, timeout: float = 60) -> None:
    """Fetches url into path by way of path.part, going on from what that holds already.

    timeout is in seconds of silence. Raises OSError (urllib's errors are of that kind).
    """
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        # "Range not satisfiable": nothing is left to fetch, if the server's size is what is here.
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            part.rename(path)
            return
        raise
    with response:
        if response.status != 206:  # the server starts from the beginning
            have = 0
        expected = have + int(response.headers.get("Content-Length") or 0)
        with open(part, "ab" if have else "wb") as file, \
                tqdm(total=expected or None, initial=have, unit="B", unit_scale=True,
                     desc=path.name) as progress:
            while block := response.read(BLOCK):
                file.write(block)
                progress.update(len(block))
    if expected > have and part.stat().st_size < expected:
        raise OSError(f"the connection ended at {part.stat().st_size:,} of {expected:,} bytes")
    with open(part, "rb") as file:
        if file.read(1) != b"{":
            part.unlink()
            raise OSError("what came is not JSONL; a log-in page of the network, perhaps")
    part.rename(path)


def main():
    parser = argparse.ArgumentParser(description="Download MiniMind's data files.")
    parser.add_argument("--source", choices=SOURCES, default="huggingface", help="where from")
    parser.add_argument("--base_url", help="another address that ends before the file name")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="FILE",
                        help=f"file names (default: {' '.join(FILES)})")
    parser.add_argument("--output_dir", type=Path, default=DATASET, help="folder to write to")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in args.files:
        path = args.output_dir / name
        if path.exists():
            print(f"{path}: there already")
            continue
        url = (args.base_url or SOURCES[args.source]) + name
        try:
            download(url, path)
        except KeyboardInterrupt:
            print("\nstopped; run the command again to go on", file=sys.stderr)
            sys.exit(130)
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"{url}: {error}. Run the command again to go on where it stopped, or "
                  f"delete {path.name}.part and try another --source.", file=sys.stderr)
            sys.exit(2)
        print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
