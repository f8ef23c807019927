"""--use_compile 1: one shape, so one compilation, and the numbers of a run without."""

import json
from itertools import pairwise

import pytest
import torch
from conftest import TINY_RUN, texts
from processes import launch_all
from torch._dynamo.testing import CompileCounter

from dataset.loader import StepSampler
from model.generate import Sampling, generate_all
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM

CONFIG = LMConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, hidden_dim=48)


def rows(count: int, seed: int) -> dict:
    """Two rows of packed documents and padding, as the loop passes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (count, 24), generator=generator)
    cut = int(torch.randint(1, 20, (), generator=generator))
    doc_ids = torch.zeros_like(ids)
    doc_ids[:, cut:], doc_ids[:, 20:] = 1, -1
    position_ids = torch.arange(24).expand(count, 24) - cut * (doc_ids == 1)
    return {"input_ids": ids, "position_ids": position_ids, "doc_ids": doc_ids,
            "targets": ids.roll(-1, 1).where(doc_ids >= 0, -100)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph_for_all_steps(checkpointing):
    """Packing and gradient checkpointing: one compilation however the documents lie, one graph, and
    the loss and gradients of the eager model, which goes another way through attention.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MiniMindLM(CONFIG, gradient_checkpointing=checkpointing)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for seed in range(4):
        gradients = []
        batch = rows(2, seed)
        batch["doc_starts"] = torch.zeros(seed + 2, dtype=torch.int32)  # as on a GPU
        for one in (compiled, model):
            model.zero_grad()
            loss = one(**batch)
            loss.backward()
            gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for ours, theirs in zip(*gradients):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_generation_after_compiled_training():
    """The model behind the compiled one generates as ever, and costs no further compilation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MiniMindLM(CONFIG)
    counter = CompileCounter()
    torch.compile(model, backend=counter)(**rows(2, 0)).backward()
    [new] = generate_all(model.eval(), [[1, 5, 9]], 4, Sampling(temperature=0), ())
    assert len(new) == 4 and counter.frame_count == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_shares_are_filled_to_whole_micro_batches(rank):
    """Every step of every process is a multiple of the micro-batch, the last, short one too."""
    sampler = StepSampler(23, 10, 6, 0, rank, 2, multiple_of=4)
    shares = list(sampler)
    assert [len(share) for share in shares] == [8, 8, 4, 8, 8, 4]
    plain = list(StepSampler(23, 10, 6, 0, rank, 2))
    for share, without in zip(shares, plain):
        assert share[: len(without)] == without and set(share[len(without) :]) <= {-1}


@pytest.mark.slow
def test_under_ddp(tmp_path):
    """Two processes, one graph in each though steps differ in length, and the curve of one process
    that does not compile.
    """
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts(90)))
    flags = [*TINY_RUN, "--save_weight", "run", "--data_path", tmp_path / "data.jsonl",
             "--cache_dir", tmp_path / "cache", "--max_steps", 15, "--epochs", 9]
    runs = launch_all(tmp_path, {
        "one": {"flags": [*flags, "--batch_size", 4, "--accumulation_steps", 6]},
        "two": {"processes": 2, "hooks": ["compiled"],
                "flags": [*flags, "--batch_size", 4, "--accumulation_steps", 3,
                          "--use_compile", 1]}})
    one, two = runs["one"], runs["two"]
    assert one.codes == [0] and two.codes == [0, 0], two.told
    tokens = [after["tokens"] - before["tokens"] for before, after in pairwise(one.log)]
    assert min(tokens) < 0.7 * max(tokens), "there was to be a short step"
    assert [seen["graphs"] for seen in two.seen] == [1, 1]
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    torch.testing.assert_close(two.weights, one.weights, rtol=1e-4, atol=1e-5)
