"""The command line of a stage script: flags in groups, and every check that needs no data.

All problems are reported together, with exit status 2, before anything is loaded.
"""

import argparse
import importlib.util
import json
import os

from model.device import DTYPES
from model.files import ROOT, find_path
from model.LMConfig import LMConfig
from trainer.common.optim import EMBEDDING_SCALE, LEARNING_RATES, splits_matrices


class Parser(argparse.ArgumentParser):
    """Of the processes of a machine, which have one command line, one says what is wrong with it.
    """

    def _print_message(self, message: str, file=None) -> None:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            super()._print_message(message, file)


def stage_parser(description: str, *, data_path: str, save_weight: str, from_weight: str,
                 max_seq_len: int) -> argparse.ArgumentParser:
    """The flags that all stages share; the keyword arguments are this stage's defaults."""
    parser = Parser(
        description=description, allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_flags(parser.add_argument_group("model"), from_weight)
    add_data_flags(parser.add_argument_group("data"), data_path, max_seq_len)
    add_optimization_flags(parser.add_argument_group("optimization"))
    add_run_flags(parser.add_argument_group("run"), save_weight)
    return parser


def add_model_flags(group, from_weight: str) -> None:
    group.add_argument("--dim", "--hidden_size", type=int, default=512, help="model width")
    group.add_argument("--n_layers", "--num_hidden_layers", type=int, default=8, help="blocks")
    group.add_argument("--n_heads", type=int, default=8, help="query heads")
    group.add_argument("--n_kv_heads", type=int, default=2, help="key/value heads")
    group.add_argument("--start_layers", type=int, default=0, metavar="N",
                       help="begin with N blocks; more come in until all are in use: more text in "
                            "the same time, for short runs; 0 = all from the beginning")
    group.add_argument("--dropout", type=float, default=0.0, help="probability, 0 = off")
    group.add_argument("--from_weight", default=from_weight, metavar="NAME|FILE|none",
                       help="weights to start from: a name is looked up in --out_dir")


def add_data_flags(group, data_path: str, max_seq_len: int) -> None:
    group.add_argument("--data_path", default=data_path, help="JSONL file to learn from")
    group.add_argument("--val_data_path", default=None,
                       help="JSONL file to validate on; without it a slice is held out, "
                            "min(1 %% of the documents, 2000)")
    group.add_argument("--max_seq_len", type=int, default=max_seq_len, help="tokens in a row")
    group.add_argument("--num_workers", type=int, default=2,
                       help="processes that prepare batches, 0 = none beside the main one")
    group.add_argument("--cache_dir", default="dataset/.cache",
                       help="folder for tokenised data, made once from each file")
    group.add_argument("--bad_lines", choices=("stop", "skip"), default="stop",
                       help="faulty lines: list them and stop, or count and leave them out")


def add_optimization_flags(group) -> None:
    group.add_argument("--epochs", type=int, default=1, help="passes over the data")
    group.add_argument("--max_steps", type=int, default=0,
                       help="end after so many optimizer steps, where the learning rate's cosine "
                            "then ends too; 0 = no cap")
    group.add_argument("--batch_size", type=int, default=8,
                       help="rows in a micro-batch; times max_seq_len it is the token budget of "
                            "one forward and backward; 0 = as many as fit into the memory (a step "
                            "then has 8 x accumulation_steps rows per process)")
    group.add_argument("--accumulation_steps", type=int, default=4,
                       help="micro-batches in an optimizer step")
    group.add_argument("--optimizer", choices=("auto", "adamw", "muon"), default="auto",
                       help="muon = orthogonalised momentum for the hidden matrices, AdamW for the "
                            "rest, learns more from each token; auto = muon, but adamw with "
                            "--deepspeed or --shard full, which split matrices")
    group.add_argument("--learning_rate", type=float, default=None,
                       help="its peak; without it what suits the --optimizer: " + ", ".join(
                           f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
                       + f"; beside muon, embedding and norms take {EMBEDDING_SCALE:g} times that")
    group.add_argument("--min_lr_ratio", type=float, default=0.1,
                       help="final learning rate as a fraction of the peak")
    group.add_argument("--warmup_steps", "--warmup_iters", type=int, default=100,
                       help="optimizer steps of linear warm-up (at most a tenth of the run)")
    group.add_argument("--weight_decay", type=float, default=0.1, help="on matrices only, 0 = off")
    group.add_argument("--grad_clip", "--max_grad_norm", type=float, default=1.0,
                       help="largest gradient norm, 0 = off")


def add_run_flags(group, save_weight: str) -> None:
    switch = {"type": int, "choices": (0, 1)}
    group.add_argument("--seed", type=int, default=42, help="of weights, packing, order, dropout")
    group.add_argument("--out_dir", "--save_dir", default="out", help="folder of all results")
    group.add_argument("--save_weight", default=save_weight,
                       help="name of the results: NAME_DIM.pth and so on")
    group.add_argument("--from_resume", default=0, **switch,
                       help="1 = go on from NAME_DIM_resume.pth, to the bit; 0 = begin anew")
    group.add_argument("--save_interval", type=int, default=100, help="steps between saves")
    group.add_argument("--max_minutes", type=float, default=0,
                       help="save and end, with exit status 0, after so many minutes; 0 = no limit")
    group.add_argument("--log_interval", type=int, default=10, help="steps between log lines")
    group.add_argument("--eval_interval", type=int, default=500,
                       help="steps between validations, 0 = only at the end")
    group.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cuda, "
                                                        "cuda:1, mps, cpu")
    group.add_argument("--dtype", choices=("auto", *DTYPES), default="auto",
                       help="of matrix products; auto = float16 on CUDA, bfloat16 on a CPU that "
                            "has it, else float32")
    group.add_argument("--gradient_checkpointing", default=0, **switch,
                       help="1 = compute activations anew in the backward pass: a quarter more "
                            "compute, a fraction of the memory")
    group.add_argument("--memory_fraction", type=float, default=0.8,
                       help="share of the memory above which micro-batches become smaller; a step "
                            "keeps its rows")
    group.add_argument("--memory_limit_gb", type=float, default=0,
                       help="memory to reckon with, in GiB; 0 = all that the device has")
    group.add_argument("--shard", choices=("none", "full"), default="none",
                       help="with several processes: full = each holds a part of every matrix "
                            "(FSDP2), for models that outgrow one card")
    group.add_argument("--deepspeed", metavar="FILE", default=None,
                       help="run DeepSpeed, with the ZeRO stage that this JSON file gives")
    group.add_argument("--use_compile", default=0, **switch, help="1 = torch.compile the model")
    group.add_argument("--use_wandb", action="store_true", help="report to the --tracker too")
    group.add_argument("--tracker", choices=("swanlab", "wandb"), default="swanlab",
                       help="which one; both honour their offline modes")
    group.add_argument("--wandb_project", default="minimind", help="project name in the tracker")
    # Launchers add it; the environment says the same.
    group.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def parse_stage_arguments(parser: argparse.ArgumentParser, argv: list[str] | None = None
                          ) -> argparse.Namespace:
    """Parses and checks; paths come back as Path, and the model's shape as `args.config`.

    Exits with status 2 and one message that lists all problems.
    """
    args = parser.parse_args(argv)
    problems = number_problems(args) + engine_problems(args)
    try:
        args.config = LMConfig(dim=args.dim, n_layers=args.n_layers, n_heads=args.n_heads,
                               n_kv_heads=args.n_kv_heads, dropout=args.dropout)
        if args.max_seq_len > args.config.max_position_embeddings:
            problems.append(f"--max_seq_len {args.max_seq_len}: expected at most "
                            f"{args.config.max_position_embeddings}")
    except ValueError as error:
        problems.append(f"model shape: {error}")
    problems += path_problems(args, parser)
    if args.use_wandb and importlib.util.find_spec(args.tracker) is None:
        problems.append(f"--tracker {args.tracker}: not installed; pip install {args.tracker}")
    if problems:
        parser.exit(2, f"{parser.prog}: " + f"\n{parser.prog}: ".join(problems) + "\n")
    return args


def number_problems(args: argparse.Namespace) -> list[str]:
    """One message for each number out of its range."""
    at_least = {"max_seq_len": 2, "epochs": 1, "batch_size": 0, "accumulation_steps": 1,
                "save_interval": 1, "log_interval": 1, "num_workers": 0, "max_steps": 0,
                "warmup_steps": 0, "eval_interval": 0, "seed": 0, "weight_decay": 0, "grad_clip": 0,
                "max_minutes": 0, "memory_limit_gb": 0, "start_layers": 0}
    problems = [
        f"--{name} {getattr(args, name)}: expected at least {least}"
        for name, least in at_least.items()
        if not getattr(args, name) >= least
    ]
    if args.start_layers > args.n_layers:
        problems.append(f"--start_layers {args.start_layers}: expected at most --n_layers "
                        f"{args.n_layers}")
    if args.start_layers and args.from_weight != "none":
        problems.append("--start_layers with --from_weight: expected none; trained blocks are all "
                        "of use from the first step on")
    if args.seed >= 2**63:
        problems.append(f"--seed {args.seed}: expected below 2^63")
    if args.learning_rate is not None and not 0 < args.learning_rate < float("inf"):
        problems.append(f"--learning_rate {args.learning_rate}: expected above 0 and finite")
    if not 0 < args.memory_fraction <= 1:
        problems.append(f"--memory_fraction {args.memory_fraction}: expected above 0, at most 1")
    if not 0 <= args.min_lr_ratio <= 1:
        problems.append(f"--min_lr_ratio {args.min_lr_ratio}: expected from 0 to 1")
    return problems


def engine_problems(args: argparse.Namespace) -> list[str]:
    """One message for each thing that --deepspeed or --shard cannot have."""
    problems = []
    if args.start_layers and (args.deepspeed or args.shard == "full"):
        problems.append("--start_layers with --deepspeed or --shard full: expected 0; those "
                        "engines want a gradient for every matrix")
    if args.shard == "full" and args.use_compile:
        problems.append("--use_compile 1 with --shard full: expected 0")
    if args.batch_size == 0 and args.use_compile:
        problems.append("--batch_size 0 with --use_compile 1: expected a number; a compiled model "
                        "sees one shape")
    if args.batch_size == 0 and (args.deepspeed or args.shard == "full"):
        problems.append("--batch_size 0 with --deepspeed or --shard full: expected a number; what "
                        "fits is found out only where a step can be tried alone")
    if args.optimizer == "muon" and splits_matrices(args):
        problems.append("--optimizer muon with --deepspeed or --shard full: expected adamw; Muon "
                        "needs whole matrices, and those engines split them")
    if args.deepspeed is None:
        return problems
    if args.shard != "none":
        problems.append("--shard with --deepspeed: expected one of them (ZeRO stage 3 is the like)")
    if args.use_compile:
        problems.append("--use_compile 1 with --deepspeed: expected 0")
    if importlib.util.find_spec("deepspeed") is None:
        problems.append("--deepspeed: not installed; pip install -r requirements-deepspeed.txt")
    path = find_path(args.deepspeed)
    try:
        config = json.loads(path.read_text("utf-8"))
        stage = config.pop("zero_optimization")["stage"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"--deepspeed {path}: expected a JSON file with a `stage` under "
                        f"`zero_optimization`, as in trainer/ds_config.json ({error!r})")
        return problems
    if stage not in (1, 2, 3):
        problems.append(f"--deepspeed {path}: stage {stage!r}, expected 1, 2 or 3")
    problems += [f"--deepspeed {path}: `{key}` is {said_by(key)}; take it out" for key in config]
    return problems


def said_by(key: str) -> str:
    """Where a run says what a key of DeepSpeed's configuration would say again."""
    flags = {"fp16": "--dtype", "bf16": "--dtype", "torch_autocast": "--dtype",
             "gradient_clipping": "--grad_clip", "optimizer": "--learning_rate, --weight_decay",
             "scheduler": "--learning_rate, --warmup_steps, --min_lr_ratio",
             "train_micro_batch_size_per_gpu": "--batch_size",
             "gradient_accumulation_steps": "--accumulation_steps",
             "train_batch_size": "--batch_size and --accumulation_steps"}
    return f"said by {flags[key]}" if key in flags else "no part of `zero_optimization`"


def path_problems(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Makes the paths of args absolute, and returns one message for each that cannot be used.

    Defaults are anchored at the repository root, wherever the script is run from.
    """
    problems = []
    for name in ("data_path", "val_data_path", "cache_dir", "out_dir", "deepspeed"):
        given = getattr(args, name)
        if given is not None:
            setattr(args, name, find_path(given, parser.get_default(name)))
    for name in ("data_path", "val_data_path"):
        path = getattr(args, name)
        if path is not None and not path.is_file():
            scripts = os.path.relpath(ROOT / "scripts")
            problems.append(
                f"--{name} {path}: there is no such file. `python {scripts}/download_data.py` "
                f"fetches MiniMind's data; `python {scripts}/make_sample_data.py` writes a small "
                "sample, dataset/sample_pretrain.jsonl and dataset/sample_sft.jsonl"
            )
    if os.sep in args.save_weight or "/" in args.save_weight or args.save_weight in ("", ".", ".."):
        problems.append(f"--save_weight {args.save_weight!r}: expected a plain name, no path")
    try:
        args.out_dir.mkdir(parents=True, exist_ok=True)
        probe = args.out_dir / f".{args.save_weight or 'probe'}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        problems.append(f"--out_dir {args.out_dir}: cannot be written to ({error.strerror})")
    return problems
