"""Cross entropy over a text, and what it says: loss, perplexity, bits per byte."""

import math
from collections.abc import Callable, Iterable

import torch

from model.device import autocast
from model.transformer import MiniMindLM


def loss_metrics(nats: float, tokens: int, text_bytes: float) -> dict[str, float]:
    """Figures of a text from its total cross entropy.

    nats: cross entropy summed over all supervised tokens; tokens: their number; text_bytes: UTF-8
    bytes of the text they spell. Returns loss (nats per token), ppl = e^loss, and
    bpb = nats / ln 2 / bytes, which does not depend on the tokenizer.
    """
    loss = nats / max(tokens, 1)
    return {
        "loss": loss,
        "ppl": math.exp(min(loss, 700.0)),  # e^710 is beyond a float
        "bpb": nats / math.log(2) / max(text_bytes, 1),
    }


@torch.no_grad()  # not inference_mode(): what ZeRO stage 3 gathers here must serve training too
def evaluate(model: MiniMindLM, batches: Iterable, token_budget: int, device: torch.device,
             dtype: torch.dtype, total: Callable[..., list[float]] = lambda *sums: list(sums)
             ) -> dict[str, float]:
    """`loss_metrics` over all batches (`Rows` of `dataset/packing.py`), plus tokens and bytes.

    Dropout is off meanwhile; the model's mode is put back afterwards. With several processes,
    `total` adds their sums up.
    """
    was_training = model.training
    model.eval()
    nats, tokens, text_bytes = 0.0, 0, 0.0
    for rows in batches:
        for micro_batch, _ in rows.split(token_budget, device):
            with autocast(device, dtype):
                nats += model(**micro_batch).item()
        tokens += rows.num_supervised
        text_bytes += rows.text_bytes
    model.train(was_training)
    nats, tokens, text_bytes = total(nats, tokens, text_bytes)
    return {**loss_metrics(nats, tokens, text_bytes), "tokens": tokens, "bytes": round(text_bytes)}
