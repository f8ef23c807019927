"""How fast: training beside a classic recipe and the device's ceiling, generation, start-up.

    python scripts/make_sample_data.py && python scripts/benchmark.py
    python scripts/benchmark.py --sections training --max_seq_len 512 --use_compile 1
    python scripts/benchmark.py --dim 64 --n_layers 2 --seconds 0.1 --repeats 1    (in a minute)

Prints one Markdown table; what it is busy with goes to standard error. The sections are files of
`scripts/benchmark_parts/`, the other side of the comparison is `scripts/classic_recipe.py`.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.jsonl import DataError
from dataset.tokenizer import Tokenizer
from model.device import choose_dtype
from scripts.benchmark_parts import ceiling, generation, startup, training
from scripts.benchmark_parts.figures import Bench, Figure, machine, table
from trainer.common.arguments import parse_stage_arguments, stage_parser
from trainer.common.distributed import start_distributed
from trainer.common.errors import run

SECTIONS = {"ceiling": ceiling.section, "training": training.section,
            "generation": generation.section, "startup": startup.section}


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those that are the stage script's."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="All other flags are those of trainer/train_pretrain.py and mean the same: --dim, "
               "--n_layers, --data_path (here dataset/sample_pretrain.jsonl), --batch_size, "
               "--num_workers, --device, --dtype, --use_compile, --gradient_checkpointing, ...")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS),
                        help="what to measure")
    parser.add_argument("--max_seq_len", "--lengths", dest="lengths", type=int, nargs="+",
                        default=[512, 340], help="tokens in a row; training is measured at each, "
                                                 "the other sections at the first")
    parser.add_argument("--seconds", type=float, default=20, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of measurements")
    parser.add_argument("--new_tokens", type=int, default=256, help="to generate")
    parser.add_argument("--out", default=None, metavar="FILE", help="write the report there, too")
    own, stage_flags = parser.parse_known_args()
    for name, least in (("repeats", 1), ("new_tokens", 1)):
        if getattr(own, name) < least:
            parser.error(f"--{name} {getattr(own, name)}: expected at least {least}")
    if not 0 < own.seconds < float("inf"):
        parser.error(f"--seconds {own.seconds}: expected above 0 and finite")
    if own.out is not None and not Path(own.out).absolute().parent.is_dir():
        parser.error(f"--out {own.out}: there is no such folder")
    return own, stage_flags


def stage_arguments(flags: list[str], length: int, folder: Path) -> argparse.Namespace:
    """The stage script's flags at one length; what it would write goes to the folder."""
    parser = stage_parser(
        "The flags of train_pretrain.py", data_path="dataset/sample_pretrain.jsonl",
        save_weight="pretrain", from_weight="none", max_seq_len=512)
    parser.add_argument("--long_docs", choices=("split", "drop"), default="split")
    args = parse_stage_arguments(parser, [*flags, "--max_seq_len", str(length), "--cache_dir",
                                          f"{folder}/cache", "--out_dir", f"{folder}/out"])
    if args.batch_size == 0 or args.deepspeed is not None or args.start_layers:
        parser.error("--batch_size 0, --deepspeed or --start_layers: expected a number, and none; "
                     "the same rows go through the same model in the ceiling and the classic "
                     "recipe, in one process")
    return args


def headline(figures: list[Figure]) -> str:
    """What the comparison comes to, in one line; empty without a training section."""
    ratios = [f"{figure.median:.2f} at {figure.section.split()[-1]} ({figure.name.split(' / ')[1]})"
              for figure in figures if figure.name.startswith("text bytes/s, ours /")]
    return f"**Text bytes/s, ours to classic: {', '.join(ratios)}**\n\n" if ratios else ""


def report(bench: Bench, figures: list[Figure]) -> str:
    """The whole Markdown page."""
    args = next(iter(bench.args.values()))
    config = args.config
    dtype = str(bench.dtype).removeprefix("torch.")
    head = [
        *machine(bench.device),
        f"model: dim {config.dim}, {config.n_layers} layers, {config.num_parameters:,} parameters; "
        f"ours in {dtype}, {args.accumulation_steps} x {args.batch_size} rows a step",
        f"data: {args.data_path.name}; {bench.repeats} rounds of {bench.seconds:g} s",
    ]
    return "".join(f"- {line}\n" for line in head) + f"\n{headline(figures)}{table(figures)}\n"


def main() -> None:
    own, stage_flags = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="benchmark.") as name:
        folder = Path(name)
        args = {length: stage_arguments(stage_flags, length, folder) for length in own.lengths}
        first = next(iter(args.values()))
        tokenizer = Tokenizer()
        for each in args.values():
            each.config = replace(each.config, vocab_size=tokenizer.vocab_size)
        dist = start_distributed(first.device)
        bench = Bench(args, stage_flags, dist, choose_dtype(first.dtype, dist.device), tokenizer,
                      own.seconds, own.repeats, own.new_tokens, folder)
        figures = []
        for section in dict.fromkeys(own.sections):
            print(f"{section} ...", file=sys.stderr, flush=True)
            figures += SECTIONS[section](bench)
        text = report(bench, figures)
    print(text, end="")
    if own.out is not None:
        Path(own.out).write_text(text, "utf-8")


if __name__ == "__main__":
    run(main, DataError, startup.StartError)
