"""Generation: greedy tokens/s with the KV cache, beside a plain loop without one."""

import time

import torch

from model.device import autocast
from model.generate import Sampling, generate
from model.transformer import MiniMindLM
from scripts.benchmark_parts.figures import Bench, Figure, synchronise

PROMPT = 32  # tokens
BATCHES = (1, 32)


@torch.inference_mode()
def without_cache(model: MiniMindLM, prompt: list[int], new_tokens: int) -> list[int]:
    """The plain loop: the whole sequence goes through the model for each new token."""
    ids = torch.tensor([prompt], device=model.model.embed_tokens.weight.device)
    for _ in range(new_tokens):
        token = model(ids)[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat((ids, token), dim=1)
    return ids[0, len(prompt) :].tolist()


def with_cache(model: MiniMindLM, prompts: list[list[int]], new_tokens: int
               ) -> tuple[list[list[int]], float]:
    """New tokens of each prompt, and the seconds until the first ones were there."""
    begun, first, steps = time.perf_counter(), None, []
    for tokens in generate(model, prompts, new_tokens, Sampling(temperature=0), stop_ids=()):
        first = first or time.perf_counter() - begun
        steps.append(tokens)
    return [list(output) for output in zip(*steps)], first


def section(bench: Bench) -> list[Figure]:
    """In rounds: each batch size, then the plain loop."""
    args, device = next(iter(bench.args.values())), bench.device
    torch.manual_seed(args.seed)
    model = MiniMindLM(args.config).to(device).eval()
    prompts = torch.randint(3, args.config.vocab_size, (max(BATCHES), PROMPT)).tolist()
    rates = {name: [] for name in (*BATCHES, "plain")}
    latencies = {batch: [] for batch in BATCHES}
    with autocast(device, bench.dtype):
        for batch in BATCHES:
            with_cache(model, prompts[:batch], 2)
        without_cache(model, prompts[0], 2)
        for _ in range(bench.repeats):
            for batch in BATCHES:
                synchronise(device)
                begun = time.perf_counter()
                _, first = with_cache(model, prompts[:batch], bench.new_tokens)
                rates[batch].append(batch * bench.new_tokens / (time.perf_counter() - begun))
                latencies[batch].append(1000 * first)
            begun = time.perf_counter()
            without_cache(model, prompts[0], bench.new_tokens)
            rates["plain"].append(bench.new_tokens / (time.perf_counter() - begun))
    one, many = BATCHES
    title = f"generation, {bench.new_tokens} new tokens"
    return [
        Figure(title, f"batch {one} / plain loop",
               tuple(a / b for a, b in zip(rates[one], rates["plain"])), "x"),
        Figure(title, f"batch {many} / batch {one}",
               tuple(a / b for a, b in zip(rates[many], rates[one])), "x"),
        *(Figure(title, f"batch {batch}: tokens/s", tuple(rates[batch])) for batch in BATCHES),
        Figure(title, "plain loop without cache, batch 1: tokens/s", tuple(rates["plain"])),
        *(Figure(title, f"batch {batch}: first token after", tuple(latencies[batch]), "ms")
          for batch in BATCHES),
    ]
