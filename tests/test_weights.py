"""Weight files: what is in them, that they are written whole or not at all, and loaded strictly."""

import contextlib
import io
import json
import os
import pickle
import random
import stat

import pytest
import torch
from conftest import save_model

from model.generate import Sampling, generate_all
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from model.weights import WeightsError, fill_model, find_weights, load_model

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50,
         "hidden_dim": 48}
LAYER = [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
KEYS = {"model.embed_tokens.weight", "model.norm.weight",
        *(f"model.layers.{n}.{name}.weight" for n in range(2) for name in LAYER)}


def new_model(seed=0, **changes) -> MiniMindLM:
    torch.manual_seed(seed)
    return MiniMindLM(LMConfig(**{**SHAPE, **changes}))


@pytest.fixture
def path(tmp_path):
    """A saved tiny model."""
    path = tmp_path / "tiny_32.pth"
    save_model(path, new_model(), {"step": 7, "stage": "pretrain"})
    return path


def read(path) -> dict:
    return torch.load(path, weights_only=True)


def assert_refused(path, *words):
    with pytest.raises(WeightsError) as caught:
        load_model(path)
    assert all(word in str(caught.value) for word in (*words, str(path.with_suffix(""))))


def test_round_trip(path):
    """A model comes back in float32 with its float16 values, its shape and what was said of it."""
    model, about = load_model(path)
    assert model.config == LMConfig(**SHAPE)
    assert (about["step"], about["stage"]) == (7, "pretrain")
    for name, tensor in new_model().state_dict().items():
        assert model.state_dict()[name].dtype == torch.float32
        assert torch.equal(model.state_dict()[name], tensor.half().float()), name


def test_file_is_a_plain_float16_state_dict(path):
    """DESIGN section 5, A52: exactly the documented keys, float16, the tied matrix once."""
    state = read(path)
    assert set(state) == KEYS
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert sum(tensor.numel() for tensor in state.values()) == new_model().num_parameters()
    assert path.stat().st_size < 2 * new_model().num_parameters() + 10_000


def test_compiled_model_leaves_keys_plain(tmp_path):
    """A51: `model` stays the plain module under torch.compile, so no prefix enters a file."""
    model = new_model()
    train_model = torch.compile(model)
    assert any(key.startswith("_orig_mod.") for key in train_model.state_dict())
    save_model(tmp_path / "compiled.pth", model, {})
    assert set(read(tmp_path / "compiled.pth")) == KEYS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 70_000.0])
def test_non_finite_weights_are_not_saved(path, value):
    """A11: weights that are not finite (in float16) are refused by name; the old file is intact."""
    model, before = new_model(1), {file: file.read_bytes() for file in path.parent.iterdir()}
    model.model.norm.weight.data[3] = value
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        save_model(path, model, {})
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_write_that_fails_half_way(path, monkeypatch, error):
    """A46, P5: a full disk or an interrupt in mid-write leaves the old file whole and no litter."""
    before = path.read_bytes()

    def half(state, file):
        file.write(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(type(error)):
        save_model(path, new_model(1), {"step": 8})
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == {"tiny_32.pth", "tiny_32.json"}
    load_model(path)


@pytest.mark.skipif(os.name != "posix", reason="folders are flushed on POSIX only")
def test_written_to_the_disk_before_the_old_file_goes(path, monkeypatch):
    """A46, P5: a new file is flushed, then renamed over the old one, then its folder flushed."""
    events, fsync, replace = [], os.fsync, os.replace

    def flushed(fd):
        events.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def renamed(source, target):
        assert path.is_file() and read(path)
        events.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    save_model(path, new_model(1), {})
    for name in ("tiny_32.json", "tiny_32.pth"):
        at = events.index(name)
        assert events[at - 1 : at + 2] == ["file", name, "folder"]


def test_lm_head_is_accepted_only_as_a_copy(path):
    """A MiniMind2 file holds the tied matrix twice: fine when equal, refused when not."""
    state = read(path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    torch.save(state, path)
    assert load_model(path)[0].num_parameters() == new_model().num_parameters()
    for other in (state["model.embed_tokens.weight"] * 1.5, torch.zeros(49, 32)):
        torch.save({**state, "lm_head.weight": other}, path)
        assert_refused(path, "lm_head.weight", "model.embed_tokens.weight")


def test_every_tensor_that_does_not_fit_is_named(path):
    """A50: missing, unknown, misshapen and non-finite tensors are listed together, not ignored."""
    state = read(path)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    state["model.norm.weight"] = torch.ones(31)
    state["model.layers.0.input_layernorm.weight"][0] = float("nan")
    torch.save(state, path)
    assert_refused(path, "4 differ", "missing model.layers.1.mlp.up_proj.weight",
                   "unknown model.layers.0.self_attn.q_norm.weight", "model.norm.weight is (31,)",
                   "expected (32,)", "model.layers.0.input_layernorm.weight")


def test_fewer_layers_do_not_fit(path):
    """A50: a 2-layer file does not quietly fill half of a 4-layer model."""
    for n_layers, words in ((4, r"18 differ.*missing model\.layers\.2"),
                            (1, r"9 differ.*unknown model\.layers\.1")):
        with pytest.raises(WeightsError, match=words):
            fill_model(new_model(n_layers=n_layers), read(path), "tiny")


def test_shape_is_read_off_the_tensors(tmp_path, capsys):
    """Without a .json the shape comes from the tensors; the assumed n_heads=8 is printed."""
    path, shape = tmp_path / "alone.pth", {"dim": 64, "n_heads": 8, "n_kv_heads": 4}
    save_model(path, new_model(**shape), {})
    path.with_suffix(".json").unlink()
    assert load_model(path)[0].config == LMConfig(**{**SHAPE, **shape})
    assert "n_heads=8 assumed" in capsys.readouterr().out


SPELLINGS = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads":
             "num_attention_heads", "n_kv_heads": "num_key_value_heads",
             "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps"}


@pytest.mark.parametrize("nested", [True, False])
def test_both_spellings_are_read(path, nested):
    """DESIGN section 5: both spellings of the shape's names mean the same."""
    ours = {**SHAPE, "norm_eps": 1e-6}
    theirs = {SPELLINGS.get(key, key): value for key, value in ours.items()}
    theirs["architectures"] = ["Any"]
    path.with_suffix(".json").write_text(json.dumps({"config": theirs} if nested else theirs))
    assert load_model(path)[0].config == LMConfig(**ours)


@pytest.mark.parametrize(("text", "words"), [
    ('{"dim": 32, "hidden_size": 64}', ("hidden_size=64 contradicts dim=32",)),
    ('{"config": {"dim": 33, "n_heads": 4}}', ("dim=33",)),
    ('{"config": {"dim": "32"}}', ()), ("[]", ()), ("{", ()), ('{"config": null}', ()),
    ('{"config": {"dim": 32.0, "n_heads": 4, "n_kv_heads": 2}}', ("dim",)),
    ('{"config": {"norm_eps": "small"}}', ("norm_eps",)),
])
def test_impossible_description_is_refused(path, text, words):
    """P6: a .json that contradicts itself, or is no model description, is named as the culprit."""
    path.with_suffix(".json").write_text(text)
    assert_refused(path, str(path.with_suffix(".json")), *words)


def legacy(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


class Bomb:
    """Unpickling this creates a file."""
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["torch", "torch legacy", "pickle"])
def test_pickle_bomb_executes_nothing(tmp_path, form):
    """A53, P7: a file that runs code when unpickled is refused, and its code does not run."""
    path, marker = tmp_path / "bomb.pth", tmp_path / "marker"
    content = {"model.embed_tokens.weight": Bomb(marker)}
    path.write_bytes(legacy(content) if form == "torch legacy" else pickle.dumps(content))
    if form == "torch":
        torch.save(content, path)
    assert_refused(path, "read safely")
    assert not marker.exists()
    pickle.loads(pickle.dumps(content))["model.embed_tokens.weight"].close()
    assert marker.exists()  # the bomb is a live one


DAMAGED = {
    "empty": b"",
    "web page": b"<!DOCTYPE html><html></html>",
    "list": legacy([torch.zeros(2)]),
    "dictionary of lists": legacy({"model.embed_tokens.weight": [1.0]}),
    "pickle without its memo": b"\x80\x02h\x05.",
    "pickle of nothing": b"\x80\x02.",
    "random": random.Random(2).randbytes(200),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_of_something_else_is_refused(path, name):
    """P6: anything but a dictionary of tensors is refused in words, with what was expected."""
    path.write_bytes(DAMAGED[name])
    assert_refused(path, "xpected", "state_dict")


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_damaged_file_is_refused_or_harmless(path, form):
    """P6: truncation is always refused, and no flipped byte gives any other error than ours."""
    whole = path.read_bytes() if form == "zip" else legacy(read(path))
    rng = random.Random(0)
    for part in (0.01, 0.3, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * part)])
        assert_refused(path, "copy or train it again")
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(min(3000, len(damaged)))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(WeightsError):
            load_model(path)


@pytest.mark.parametrize("names", [[], ["a"], ["model.embed_tokens.weight"], [3]])
def test_foreign_tensors_without_description(tmp_path, names):
    """P6: tensors of another kind of model are refused even where no .json gives a shape."""
    torch.save(dict.fromkeys(names, torch.ones(2)), tmp_path / "foreign.pth")
    assert_refused(tmp_path / "foreign.pth")


def test_names_are_looked_up(path, tmp_path):
    """A file, a name, or a name without its size finds weights; else what is there is listed."""
    assert find_weights(str(path), tmp_path / "nowhere") == path
    for name in ("tiny_32", "tiny"):
        assert find_weights(name, tmp_path) == path
    assert find_weights("tiny", tmp_path, dim=32) == path
    for dim, name in ((64, "tiny"), (None, "tin"), (None, "tiny_resume")):
        with pytest.raises(WeightsError, match="tiny_32"):
            find_weights(name, tmp_path, dim)
    (tmp_path / "tiny_32_resume.pth").touch()
    assert find_weights("tiny", tmp_path) == path
    (tmp_path / "tiny_64.pth").touch()
    with pytest.raises(WeightsError, match=r"several.*tiny_32, tiny_64"):
        find_weights("tiny", tmp_path)
    with pytest.raises(WeightsError, match="none yet"):
        find_weights("tiny", tmp_path / "nowhere")


def test_minimind2_parity(shared):
    """MiniMind2 weights give MiniMind's logits within 1e-4 in float32, and its greedy output."""
    model, _ = load_model(shared / "parity" / "minimind2_tiny.pth")
    expected = read(shared / "parity" / "minimind2_tiny_expected.pth")
    logits = model.eval()(expected["input_ids"]).detach()
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-4)
    prompt, output = expected["greedy_prompt"][0].tolist(), expected["greedy_output"][0].tolist()
    new = generate_all(model, [prompt], len(output) - 8, Sampling(temperature=0), ())
    assert prompt + new[0] == output


def test_minimind3_is_refused_for_now(shared):
    """A50: MiniMind-3's q_norm and k_norm are not supported yet, and said to be unknown."""
    with pytest.raises(WeightsError, match=r"unknown model\.layers\.0\.self_attn\.[qk]_norm"):
        load_model(shared / "parity" / "minimind3_tiny.pth")
