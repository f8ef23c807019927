"""The stage scripts as users start them: launchers, folders, messages, trackers."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import eval_model
from model.files import find_path
from model.generate import Sampling
from trainer.common.arguments import parse_stage_arguments, stage_parser
from trainer.common.logger import duration

TINY = ("--dim", 32, "--n_layers", 1, "--n_heads", 4, "--device", "cpu", "--num_workers", 0,
        "--max_seq_len", 64, "--max_steps", 2, "--batch_size", 2, "--accumulation_steps", 1)


@pytest.fixture
def text_file(write_jsonl):
    return write_jsonl("text.jsonl", [{"text": f"The fox counts to {n}."} for n in range(150)])


@pytest.fixture
def chat_file(write_jsonl):
    return write_jsonl("chat.jsonl", [{"conversations": [
        {"role": "user", "content": f"What comes after {n}?"},
        {"role": "assistant", "content": f"{n + 1}."}]} for n in range(50)])


@pytest.fixture
def run_stage(run_script, tmp_path):
    """run_script for a stage script, with a token cache in the test's folder."""
    def run(script, *flags, **options):
        return run_script(script, "--cache_dir", tmp_path / "cache", *flags, **options)

    return run


def assert_refused(result, *words):
    """Exit status 2, a message with these words, no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


FIRST_LINE = r"[\d,]+ parameters \| up to 512 tokens per step \| 3 steps \| world_size 1 \| " \
             r"\S.* \| b?float\d+ \| seed 42"
STEP_LINE = r"step 3/3 \| loss \d+\.\d{3} \| lr \d\.\de-\d\d \| grad_norm \d+\.\d\d \| " \
            r"[\d,]+ tok/s \| mem \d+\.\d GiB \| eta (\d+h\d\dm|\d+m\d\ds|\d+s)\n"


@pytest.mark.parametrize("launcher", [["-m", "torch.distributed.run", "--nproc_per_node=1"], []])
@pytest.mark.parametrize("stage, data", [("pretrain", "text_file"), ("full_sft", "chat_file")])
def test_documented_lines_in_the_trainer_folder(launcher, stage, data, request, tmp_path):
    """A60: cd trainer; torchrun or python, flags with `=`; the first line and a step's line."""
    command = [sys.executable, *launcher, f"train_{stage}.py", "--batch_size=2",
               "--accumulation_steps=4", "--max_seq_len=64", "--epochs=2", "--dim=32",
               "--n_layers=1", "--n_heads=4", f"--data_path={request.getfixturevalue(data)}",
               "--from_weight=none", f"--out_dir={tmp_path / 'o'}", f"--cache_dir={tmp_path}",
               "--max_steps=3", "--log_interval=1", "--num_workers=2"]
    result = subprocess.run(command, cwd=ROOT / "trainer", capture_output=True, text=True,
                            timeout=240)
    assert result.returncode == 0, result.stderr
    assert re.search(FIRST_LINE, result.stdout) and re.search(STEP_LINE, result.stdout)
    assert (tmp_path / "o" / f"{stage}_32.pth").is_file()


def test_pretrain_then_sft_then_eval(run_script, run_stage, text_file, chat_file, tmp_path):
    """A70: the whole chain from another folder, with relative paths looked up from there."""
    common = (*TINY, "--out_dir", "results")
    first = run_stage("trainer/train_pretrain.py", "--data_path", "text.jsonl", *common)
    assert first.returncode == 0, first.stderr
    second = run_stage("trainer/train_full_sft.py", "--data_path", "chat.jsonl", *common)
    assert second.returncode == 0, second.stderr
    assert "starting from" in second.stdout
    state = torch.load(tmp_path / "results" / "full_sft_32.pth", weights_only=True)
    assert all(tensor.dtype == torch.float16 for tensor in state.values())
    reply = run_script("eval_model.py", "--out_dir", "results", "--prompt", "hi", "--json",
                       "--max_new_tokens", 4)
    assert reply.returncode == 0, reply.stderr
    assert json.loads(reply.stdout.splitlines()[-1])["answers"][0]["prompt"] == "hi"


def test_missing_data_names_file_and_commands(run_stage, tmp_path):
    """P6: the message names the file, the command that downloads it, the one that makes a sample.
    """
    result = run_stage("trainer/train_pretrain.py", "--data_path", "nowhere.jsonl", "--out_dir",
                        tmp_path)
    assert_refused(result, "nowhere.jsonl", "download_data.py", "make_sample_data.py")


def test_weights_that_fit_but_mean_something_else(run_stage, text_file, chat_file, tmp_path):
    """A50: another number of heads has the same tensor shapes; the .json tells them apart."""
    flags = (*TINY, "--out_dir", tmp_path / "o")
    first = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *flags,
                      "--n_kv_heads", 4)
    assert first.returncode == 0, first.stderr
    result = run_stage("trainer/train_full_sft.py", "--data_path", chat_file, *flags,
                       "--n_heads", 2, "--n_kv_heads", 2)
    assert_refused(result, "n_heads is 4, expected 2")


def test_all_argument_problems_at_once(run_stage, text_file, tmp_path):
    """One run shows every wrong number, shape and name."""
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, "--out_dir",
                        tmp_path, "--n_heads", 7, "--batch_size", -1, "--learning_rate", "nan",
                        "--dropout", 1.5, "--save_weight", "a/b")
    assert_refused(result, "n_heads", "--batch_size -1", "--learning_rate nan", "dropout=1.5",
                   "--save_weight 'a/b'")


@pytest.mark.parametrize("flags, words", [
    (("--dtype", "bf16"), ("bf16", "bfloat16")),
    (("--device", "cuda:99"), ("cuda:99",)),
    (("--device", "toaster"), ("toaster",)),
    (("--from_weight", "nothing"), ("nothing",)),
    (("--tracker", "tensorboard", "--use_wandb"), ("tensorboard",)),
])
def test_bad_choices_are_refused(run_stage, text_file, tmp_path, flags, words):
    """A08 and P6: found at the start, with what came and what was expected."""
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *TINY, "--out_dir",
                        tmp_path / "o", *flags)
    assert_refused(result, *words)


def test_bad_lines_stop_or_skip(run_stage, write_jsonl, tmp_path):
    """P6 through the command line: file:line and advice; or counted and left out."""
    path = write_jsonl("mixed.jsonl", b'{"text": "good one"}\n{"text": 5}\n{"text": "good two"}\n')
    flags = ("--data_path", path, *TINY, "--out_dir", tmp_path / "o")
    stopped = run_stage("trainer/train_pretrain.py", *flags)
    assert_refused(stopped, f"{path}:2:", "--bad_lines skip")
    skipped = run_stage("trainer/train_pretrain.py", *flags, "--bad_lines", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert "1 faulty line(s)" in skipped.stdout and "2 documents" in skipped.stdout


def test_starting_weights_of_another_shape(run_stage, text_file, chat_file, tmp_path):
    """A50: eight layers do not silently become sixteen."""
    flags = (*TINY, "--out_dir", tmp_path / "o")
    assert run_stage("trainer/train_pretrain.py", "--data_path", text_file, *flags).returncode == 0
    result = run_stage("trainer/train_full_sft.py", "--data_path", chat_file, *flags,
                        "--n_layers", 2)
    assert_refused(result, "n_layers is 1, expected 2")
    (tmp_path / "o" / "pretrain_32.json").unlink()
    result = run_stage("trainer/train_full_sft.py", "--data_path", chat_file, *flags,
                       "--n_layers", 2)
    assert_refused(result, "n_layers=2", "missing model.layers.1")


def test_out_dir_that_is_a_file(run_stage, text_file, tmp_path):
    """P6: an output folder that cannot be written is found before anything is loaded."""
    (tmp_path / "taken").write_text("")
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *TINY, "--out_dir",
                        tmp_path / "taken")
    assert_refused(result, "--out_dir", "taken")


def test_show_sample(run_stage, chat_file):
    """--show_sample prints tokens with what is supervised, and ends."""
    result = run_stage("trainer/train_full_sft.py", "--data_path", chat_file, "--show_sample", 1)
    assert result.returncode == 0, result.stderr
    marked = [line.split(maxsplit=2) for line in result.stdout.splitlines() if " + " in line]
    assert marked[-1][-1] == "'<|im_end|>'"
    assert "".join(unquoted(text) for _, _, text in marked[:-1] if text) == "1."


def unquoted(quoted):
    """The text inside repr's quotes (these samples hold no escapes)."""
    return quoted[1:-1]


@pytest.mark.parametrize("tracker", ["swanlab", "wandb"])
def test_trackers_work_offline(run_stage, text_file, tmp_path, monkeypatch, tracker):
    """Both trackers run in their offline modes, without a network or an account."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *TINY, "--out_dir",
                        tmp_path / "o", "--use_wandb", "--tracker", tracker)
    assert result.returncode == 0, result.stderr
    assert "left out from here on" not in result.stderr, result.stderr
    folder = tmp_path / "o" / {"swanlab": "swanlog", "wandb": "wandb"}[tracker]
    assert any(path.is_file() for path in folder.rglob("*"))


def test_a_failing_tracker_does_not_stop_training(run_stage, text_file, tmp_path, monkeypatch):
    """A tracker that raises on every call is reported once, and the run ends well."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "wandb.py").write_text("def init(**_):\n    pass\n\n"
                                   "def log(*_, **__):\n    raise RuntimeError('no network')\n")
    monkeypatch.setenv("PYTHONPATH", str(fake))
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *TINY, "--out_dir",
                        tmp_path / "o", "--use_wandb", "--tracker", "wandb", "--log_interval", 1)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no network") == 1
    assert (tmp_path / "o" / "pretrain_32.pth").is_file()


def test_help_states_units_and_defaults(run_script):
    """Every flag of both scripts has a help text; both spellings are shown."""
    result = run_script("trainer/train_full_sft.py", "--help")
    assert result.returncode == 0
    for word in ("--hidden_size", "--num_hidden_layers", "--warmup_iters", "--max_grad_norm",
                 "--save_dir", "0.0005 for adamw", "0 = off"):
        assert word in " ".join(result.stdout.split())


def test_launcher_flag_local_rank_is_accepted(run_stage, text_file, tmp_path):
    """A67: launchers that pass --local_rank=N do not end in "unrecognized arguments"."""
    result = run_stage("trainer/train_pretrain.py", "--local_rank=0", "--data_path", text_file,
                        *TINY, "--out_dir", tmp_path / "o")
    assert result.returncode == 0, result.stderr


def test_defaults_are_anchored_at_the_root(text_file, tmp_path, monkeypatch):
    """A70: defaults mean the repository's folders, typed paths those where one stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    parser = stage_parser("", data_path="dataset/x.jsonl", save_weight="w", from_weight="none",
                          max_seq_len=64)
    args = parse_stage_arguments(parser, ["--data_path", "text.jsonl"])
    assert args.data_path == tmp_path / "text.jsonl"
    assert (args.out_dir, args.cache_dir) == (ROOT / "out", ROOT / "dataset" / ".cache")
    assert find_path("README.md") == ROOT / "README.md"
    assert find_path("out") == tmp_path / "out" and find_path("new") == tmp_path / "new"


def test_chat_defaults_and_sampling_flags(monkeypatch):
    """A90: a mild penalty and 512 tokens by default; every sampling flag reaches the sampler."""
    monkeypatch.setattr(sys, "argv", ["eval_model.py"])
    args = eval_model.parse_arguments()
    assert (args.weight, args.max_new_tokens, args.device, args.dtype) == (
        "full_sft", 512, "auto", "auto")
    assert (args.sampling.temperature, args.sampling.top_p, args.sampling.top_k) == (.85, .85, 0)
    assert 1 < args.sampling.repetition_penalty <= 1.2
    monkeypatch.setattr(sys, "argv", "_ --temperature 0.5 --top_p 0.6 --top_k 7 "
                                     "--repetition_penalty 1.3".split())
    assert eval_model.parse_arguments().sampling == Sampling(0.5, 0.6, 7, 1.3)


def test_what_a_tracker_is_told(run_stage, text_file, tmp_path, monkeypatch):
    """Loss, perplexity, learning rate, gradient norm and speed reach the tracker, by step."""
    fake, told = tmp_path / "fake", tmp_path / "told.jsonl"
    fake.mkdir()
    (fake / "wandb.py").write_text(
        "import json\n\ndef init(**_):\n    pass\n\nfinish = init\n\n"
        f"def log(row, step):\n    with open({str(told)!r}, 'a') as file:\n"
        "        file.write(json.dumps([step, row]) + '\\n')\n")
    monkeypatch.setenv("PYTHONPATH", str(fake))
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *TINY, "--out_dir",
                       tmp_path / "o", "--use_wandb", "--tracker", "wandb", "--log_interval", 1)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    assert [step for step, _ in rows] == [1, 2]
    assert {"loss", "ppl", "lr", "grad_norm", "tokens_per_s"} <= set(rows[0][1])


def test_durations_read_like_the_documented_ones():
    """The ETA's three forms."""
    assert [duration(s) for s in (12.9, 185, 4320)] == ["12s", "3m05s", "1h12m"]
