"""The stage scripts as users start them: launchers, folders, messages, trackers."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

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


def test_torchrun_in_the_trainer_folder(text_file, tmp_path):
    """The documented line: cd trainer, torchrun with one process, flags with `=`; two workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1",
               "train_pretrain.py", "--batch_size=2", "--accumulation_steps=4", "--max_seq_len=64",
               "--epochs=1", "--dim=32", "--n_layers=1", "--n_heads=4", f"--data_path={text_file}",
               f"--out_dir={tmp_path / 'o'}", f"--cache_dir={tmp_path}", "--max_steps=3",
               "--log_interval=1", "--num_workers=2"]
    result = subprocess.run(command, cwd=ROOT / "trainer", capture_output=True, text=True,
                            timeout=240)
    assert result.returncode == 0, result.stderr
    assert "step 3/3 | loss " in result.stdout and " tok/s | mem " in result.stdout
    assert " | eta " in result.stdout and "world_size 1" in result.stdout
    assert (tmp_path / "o" / "pretrain_32.pth").is_file()


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


def test_resume_is_not_pretended(run_stage, text_file, tmp_path):
    """--from_resume 1 is refused until it is there, rather than starting anew without a word."""
    result = run_stage("trainer/train_pretrain.py", "--data_path", text_file, *TINY, "--out_dir",
                       tmp_path / "o", "--from_resume", 1)
    assert_refused(result, "--from_resume 1", "--from_weight")


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
                        tmp_path, "--n_heads", 7, "--batch_size", 0, "--learning_rate", "nan",
                        "--dropout", 1.5, "--save_weight", "a/b")
    assert_refused(result, "n_heads", "--batch_size 0", "--learning_rate nan", "dropout=1.5",
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
                 "--save_dir", "default: 0.0001", "0 = off"):
        assert word in " ".join(result.stdout.split())


def test_launcher_flag_local_rank_is_accepted(run_stage, text_file, tmp_path):
    """A67: launchers that pass --local_rank=N do not end in "unrecognized arguments"."""
    result = run_stage("trainer/train_pretrain.py", "--local_rank=0", "--data_path", text_file,
                        *TINY, "--out_dir", tmp_path / "o")
    assert result.returncode == 0, result.stderr
