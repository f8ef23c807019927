"""Generation: the cache changes nothing, padding changes nothing, and sampling draws as it says."""

import math

import pytest
import torch

from model.attention import PAD_DOC_ID
from model.generate import KVCache, Sampling, generate, generate_all, next_token
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM

GREEDY = Sampling(temperature=0)
PROMPTS = [[7, 3, 9], [5], [1, 2, 3, 4, 5, 6, 8, 9, 10], [11, 12, 13, 14]]




def tiny_model(**changes) -> MiniMindLM:
    """Random weights large enough for confident predictions."""
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50,
             "hidden_dim": 48}
    model = MiniMindLM(LMConfig(**{**shape, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def greedy_by_hand(model, prompt: list[int], count: int) -> list[int]:
    """The most likely token, each time from a whole forward without cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt):]


@pytest.mark.parametrize("chunks", [[5] + [1] * 11, [1] * 16, [16], [4, 7, 5], [1, 15]])
def test_cached_logits_equal_uncached(chunks):
    """However a sequence is fed through the cache - prefill then one by one, or in chunks - the
    logits are those of one forward over all of it.
    """
    model = tiny_model()
    ids = torch.randint(0, 50, (2, 16))
    with torch.no_grad():
        whole, cache, parts = model(ids), KVCache(model, batch=2, capacity=16), []
        for chunk in ids.split(chunks, dim=1):
            parts.append(model(chunk, kv_cache=cache))
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)


def test_cache_keeps_documents_apart():
    """P2 with a cache: a second document that follows in the same row is not told of the first."""
    model = tiny_model()
    first, second = torch.randint(0, 50, (1, 6)), torch.randint(0, 50, (1, 5))
    cache = KVCache(model, batch=1, capacity=11)
    with torch.no_grad():
        model(first, kv_cache=cache)
        logits = model(second, torch.arange(5)[None], torch.ones_like(second), kv_cache=cache)
        torch.testing.assert_close(logits, model(second), rtol=0, atol=1e-5)


def test_greedy_equals_argmax_by_hand():
    """Generation with cache at temperature 0 takes the most likely token at each step."""
    model = tiny_model()
    for prompt in PROMPTS:
        [output] = generate_all(model, [prompt], 12, GREEDY, ())
        assert output == greedy_by_hand(model, prompt, 12)


def test_padded_batch_equals_single():
    """A80, A81: prompts of different lengths generated together give what each gives alone."""
    model = tiny_model()
    together = generate_all(model, PROMPTS, 12, GREEDY, ())
    assert together == [greedy_by_hand(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_left_padding_gives_no_nan(dtype):
    """A80: a left-padded row has finite logits in every dtype, those of the row alone."""
    model = tiny_model().to(dtype)
    ids = torch.tensor([[0, 0, 0, 7, 3, 9], [1, 2, 3, 4, 5, 6]])
    doc_ids = torch.tensor([[PAD_DOC_ID] * 3 + [0] * 3, [0] * 6])
    position_ids = torch.tensor([[0, 0, 0, 0, 1, 2], [*range(6)]])
    with torch.no_grad():
        logits = model(ids, position_ids, doc_ids, kv_cache=KVCache(model, 2, 6))
        assert logits.isfinite().all()
        alone = model(ids[:1, 3:])
    tolerance = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(logits[:1, 3:], alone, rtol=0, atol=tolerance)
    outputs = generate_all(model, PROMPTS, 8, Sampling(), (), seed=1)
    assert [len(output) for output in outputs] == [8] * 4


def test_cache_under_autocast():
    """Under autocast the cache holds what the projections give, and greedy output is unharmed."""
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = generate_all(model, PROMPTS, 5, GREEDY, ())
        assert outputs == [greedy_by_hand(model, prompt, 5) for prompt in PROMPTS]


@pytest.mark.parametrize("count", [0, 1, 8])
def test_max_new_tokens_is_honoured(count):
    """A84: never a token more than max_new_tokens."""
    steps = list(generate(tiny_model(), PROMPTS, count, GREEDY, ()))
    assert len(steps) == count and all(None not in step for step in steps)


def test_stop_ids_end_each_prompt():
    """A90: a stop id ends its prompt and is not yielded; the others go on; all done ends all."""
    model = tiny_model()
    free = [greedy_by_hand(model, prompt, 12) for prompt in PROMPTS]
    at = next(i for i, token in enumerate(free[0]) if i > 0 and token not in free[0][:i])
    stop = free[0][at]
    expected = [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert generate_all(model, PROMPTS, 12, GREEDY, (stop,)) == expected
    assert generate_all(model, PROMPTS[:1], 12, GREEDY, (49, stop)) == expected[:1]
    assert len(list(generate(model, PROMPTS[:1], 12, GREEDY, (stop,)))) == at
    every = tuple(range(50))
    assert list(generate(model, PROMPTS, 12, GREEDY, every)) == []


def test_ends_at_the_last_position():
    """Generation ends where the model has no positions left, and says so if there is none."""
    model = tiny_model(max_position_embeddings=12)
    assert generate_all(model, [[1] * 9], 100, GREEDY, ()) == [greedy_by_hand(model, [1] * 9, 3)]
    for prompts in ([[1] * 12], [[1] * 13, [2]], [[1], []]):
        with pytest.raises(ValueError, match="max_position_embeddings = 12"):
            generate_all(model, prompts, 1, GREEDY, ())


def draw(logits: list[float], how: Sampling, seen=(), count=1, seed=0) -> torch.Tensor:
    """Draws count times from one row of logits."""
    rows = torch.tensor(logits).expand(count, -1)
    occurred = torch.zeros(len(logits), dtype=torch.bool)
    occurred[list(seen)] = True
    generator = torch.Generator().manual_seed(seed)
    return next_token(rows, occurred.expand(count, -1), how, generator)


def expected_probs(logits, how: Sampling, seen=()) -> list[float]:
    """What sampling should draw: penalty, temperature, top-k, then top-p, in plain Python."""
    r = how.repetition_penalty
    logits = [(x / r if x > 0 else x * r) if i in seen else x for i, x in enumerate(logits)]
    weights = [math.exp(x / how.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    order = order[: how.top_k or len(order)]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= how.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("how", [
    Sampling(temperature=1, top_p=1), Sampling(temperature=0.5, top_p=1),
    Sampling(temperature=2, top_p=1), Sampling(temperature=1, top_p=1, top_k=3),
    Sampling(temperature=1, top_p=0.7), Sampling(temperature=0.85, top_p=0.85),
    Sampling(temperature=1, top_p=0.9, top_k=4),
    Sampling(temperature=1, top_p=1, repetition_penalty=1.8),
    Sampling(temperature=0.7, top_p=0.8, top_k=5, repetition_penalty=1.3),
])
def test_draws_follow_the_stated_distribution(how):
    """Frequencies of 20,000 draws are within 4.5 standard deviations of temperature, top-k, top-p
    and penalty computed by hand; what is cut never occurs.
    """
    logits, seen, count = [0.3, 1.9, -0.4, 1.0, -1.2, 0.9], (1, 2), 20_000
    drawn = torch.bincount(draw(logits, how, seen, count), minlength=6).tolist()
    for token, p in enumerate(expected_probs(logits, how, seen)):
        spread = 4.5 * math.sqrt(count * p * (1 - p))
        assert abs(drawn[token] - count * p) <= spread, (token, p, drawn)


def test_top_k_beyond_the_vocabulary_is_all_of_it():
    """A82: top_k = 50 of 6 tokens neither fails nor changes anything."""
    logits = [0.3, 1.9, -0.4, 1.0, -1.2, 0.9]
    for top_k in (6, 50, 10**9):
        assert torch.equal(draw(logits, Sampling(1.0, 1.0, top_k), count=100),
                           draw(logits, Sampling(1.0, 1.0, 0), count=100))


@pytest.mark.parametrize("how", [
    Sampling(temperature=0), Sampling(top_p=1e-9), Sampling(temperature=2, top_k=1),
    Sampling(temperature=1e-3), Sampling(temperature=1e-30), Sampling(temperature=1e-42),
])
def test_the_most_likely_token_always_stays(how):
    """A82: greedy, a tiny top_p, top_k 1 and a tiny temperature all take the most likely token."""
    assert draw([0.3, 1.9, -0.4, 1.0, -20.0, 1.8], how, count=50).tolist() == [1] * 50


def test_penalty_makes_repetition_less_likely():
    """A90: a penalty above 1 lowers a token that occurred, whether its logit is positive or
    negative; one below 1 raises it; tokens that did not occur are untouched.
    """
    stronger = Sampling(temperature=0, repetition_penalty=2.0)
    assert draw([3.0, 2.0, 0.0], stronger, seen=[0]) == 1
    assert draw([-1.0, -1.5, -9.0], stronger, seen=[0]) == 1
    assert draw([-1.0, -1.5, -9.0], Sampling(temperature=0, repetition_penalty=0.5), seen=[1]) == 1
    assert draw([3.0, 2.0, 0.0], stronger, seen=[1, 2]) == 0


def test_penalty_covers_prompt_and_output():
    """A90: under a huge penalty no token of prompt or output comes again while others are left."""
    [output] = generate_all(tiny_model(), [[1, 2, 3]], 20,
                            Sampling(temperature=0, repetition_penalty=1e6), ())
    low = tiny_model()(torch.tensor([[1, 2, 3]]))[0, -1]
    assert (low > 0).any()
    assert len({1, 2, 3, *output}) == 23


def test_seed_reproduces():
    """The same seed gives the same tokens, another seed others, whatever was drawn before."""
    model, how = tiny_model(), Sampling(temperature=1.5, top_p=1)
    first = generate_all(model, PROMPTS, 10, how, (), seed=3)
    torch.rand(5)
    assert generate_all(model, PROMPTS, 10, how, (), seed=3) == first
    assert generate_all(model, PROMPTS, 10, how, (), seed=4) != first
    assert generate_all(model, PROMPTS, 10, how, ()) != generate_all(model, PROMPTS, 10, how, ())


def test_impossible_settings_are_named_together():
    """P6: all values out of range are named in one message; NaN is none of them."""
    with pytest.raises(ValueError) as caught:
        Sampling(temperature=-1, top_p=0, top_k=-2, repetition_penalty=0)
    for name in ("temperature -1", "top_p 0", "top_k -2", "repetition_penalty 0"):
        assert name in str(caught.value)
    nan = float("nan")
    for wrong in ({"temperature": nan}, {"top_p": nan}, {"repetition_penalty": nan},
                  {"top_p": 1.1}, {"repetition_penalty": -2.0}):
        with pytest.raises(ValueError):
            Sampling(**wrong)
