"""Pretraining: learn to predict the next token of plain text.

    minimise   - sum_t log p(x_t | x_<t)  /  number of t        over all tokens t of a step's texts

as in GPT (Radford et al. 2018), with the shape and schedule of Llama (arXiv:2302.13971). Run it:

    python trainer/train_pretrain.py --data_path dataset/sample_pretrain.jsonl
    torchrun --nproc_per_node=1 train_pretrain.py --batch_size=8    (in this folder)

Where we differ from the usual recipe: documents are packed into full rows and do not see each
other (`dataset/packing.py`), and a step's loss is divided by the number of targets in the whole
step, not by the number of micro-batches. It writes out/pretrain_512.pth. Not here: fine-tuning
(`train_full_sft.py`), which differs in data, flags and starting weights alone.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.jsonl import DataError
from dataset.loader import StepLoader, StepSampler, batches_in_order, steps_per_epoch
from dataset.pretrain import PRETRAIN
from dataset.stage_data import open_data
from dataset.tokenizer import Tokenizer
from model.device import autocast, choose_dtype
from model.transformer import MiniMindLM
from trainer.common.arguments import parse_stage_arguments, stage_parser
from trainer.common.checkpoint import Checkpoint, start_weights
from trainer.common.distributed import start_distributed
from trainer.common.engines import make_engine, place
from trainer.common.errors import run
from trainer.common.finite import FiniteCheck
from trainer.common.logger import Logger, first_line
from trainer.common.memory import MemoryGuard
from trainer.common.optim import make_optimizer
from trainer.common.schedule import depth, learning_rate
from trainer.common.stop import Stop
from trainer.common.validation import Validation


def parse_arguments():
    parser = stage_parser(
        "Pretrain on plain text.", data_path="dataset/pretrain_hq.jsonl",
        save_weight="pretrain", from_weight="none", max_seq_len=512,
    )
    parser.add_argument("--long_docs", choices=("split", "drop"), default="split",
                        help="documents longer than a row: cut into pieces, or leave out")
    return parse_stage_arguments(parser)


def main():
    args = parse_arguments()
    tokenizer = Tokenizer()
    dist = start_distributed(args.device, needs_group=args.deepspeed is not None)
    stop = Stop(dist, args.max_minutes)
    checkpoint = Checkpoint(args, dist, PRETRAIN.name, tokenizer.hash)
    dtype = dist.from_main(lambda: choose_dtype(args.dtype, dist.device))
    torch.manual_seed(args.seed)

    # --- Model
    config = replace(args.config, vocab_size=tokenizer.vocab_size)
    model = MiniMindLM(config, gradient_checkpointing=bool(args.gradient_checkpointing))
    if not checkpoint.resumed:
        start_weights(model, args, tokenizer.hash)
    place(model, args, dist)

    # --- Data
    train_set, val_set = open_data(PRETRAIN, tokenizer, args)
    checkpoint.compare_data(train_set, val_set)
    global_batch = checkpoint.global_batch  # rows in a step, over all processes
    epoch_steps = steps_per_epoch(len(train_set), global_batch)
    total_steps = min(args.epochs * epoch_steps, args.max_steps or sys.maxsize)
    if checkpoint.is_finished(total_steps):
        return stop.finish()
    sampler = StepSampler(len(train_set), global_batch, total_steps, args.seed,
                          dist.rank, dist.world_size, checkpoint.start_step,
                          multiple_of=args.batch_size if args.use_compile else 1)
    loader = StepLoader(train_set, sampler, args.num_workers, dist.device.type == "cuda")

    # --- Optimizer
    optimizer = make_optimizer(model, args, dtype)
    engine = make_engine(model, optimizer, args, dist, dtype)

    # --- Wrap
    model.depth = depth(max(checkpoint.start_step - 1, 0), total_steps, args)  # of the last step
    train_model = engine.wrap(torch.compile(model) if args.use_compile else model)

    # --- Resume
    logger = Logger(args, dist, total_steps, epoch_steps)
    finite = FiniteCheck(loader.documents_of, logger.print)
    guard = MemoryGuard(args, dist, engine, checkpoint.rows_per_process, logger.print)
    checkpoint.begin(total_steps, engine=engine, log=logger, finite=finite, memory=guard)
    print(first_line(engine, args, global_batch, total_steps), flush=True)
    logger.open(checkpoint.files, checkpoint.start_step)
    guard.probe(model, dtype)
    validation = Validation(args, dist, dtype, stop, logger, model, guard, val_set,
                            make_batches=batches_in_order)
    validation.catch_up(checkpoint.start_step)

    # --- Loop
    model.train()
    stop.begin()
    for step, rows in loader:  # rows: this process's share of the step
        lr = learning_rate(step, total_steps, args)
        model.depth = depth(step, total_steps, args)  # blocks in use

        # Gradient of (sum of cross entropy) / (number of targets), over the whole step
        tokens, text_bytes = dist.sum(rows.num_supervised, rows.text_bytes)
        for attempt in guard.attempts():  # one, or more and smaller ones if memory runs out
            with attempt:
                nats, loss = 0.0, None  # nats: the step's sum; None frees a failed attempt's graph
                for micro_batch, is_last in rows.split(guard.token_budget, dist.device):
                    with engine.sync(is_last):  # gradients travel with the last micro-batch only
                        with autocast(dist.device, dtype):
                            loss = train_model(**micro_batch)  # summed over its targets
                        engine.backward(loss / tokens)
                    nats += loss.detach()
        nats = dist.add_up(nats)
        grad_norm = engine.update(lr, args.grad_clip, nats)
        finite.note(step, engine.outcome)

        logger.step(step, nats, tokens, text_bytes, lr, grad_norm, engine.skipped_steps)
        with logger.paused():
            guard.after(step)
            validation.after(step)
            stopping = stop.now(is_last=step + 1 == total_steps)
            checkpoint.after(step, stopping)
        if stopping:
            break
    logger.finish(checkpoint.result, loader.wait_seconds)
    checkpoint.finish()
    return stop.finish()


if __name__ == "__main__":
    run(main, DataError)
