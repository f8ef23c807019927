"""The chat test: talk to a model, ask it a list of questions, score it, or measure its loss.

    python eval_model.py                                   a built-in list of questions
    python eval_model.py --interactive                     a chat, with history
    python eval_model.py --prompt "What is the capital of France?"
    python eval_model.py --test dataset/sample_test.jsonl  right answers, counted
    python eval_model.py --data_path FILE.jsonl            loss, perplexity, bits per byte
    python eval_model.py --weight pretrain                 continues texts instead of chatting

Not here: training (`trainer/`), sampling itself (`model/generate.py`).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataset.jsonl import DataError, JsonlReader, clean_surrogates
from dataset.packing import TokenBudgetCollate, make_piece
from dataset.stage_data import parse_any
from dataset.tokenizer import BOS_ID, STOP_IDS, Tokenizer
from model.device import DTYPES, DeviceError, autocast, choose_device, choose_dtype
from model.files import find_path
from model.generate import Sampling, generate, generate_all
from model.metrics import evaluate
from model.weights import WeightsError, find_weights, load_model

QUESTIONS = (
    "你好，你是谁？", "中国的首都是哪里？", "请把“苹果”翻译成英文。", "一年有几个季节？",
    "讲一个小故事。",
    "Hello, who are you?", "What is the capital of France?", "What is the opposite of hot?",
    "How many days are in a week?", "Tell me a short story.",
)
BEGINNINGS = ("中国的首都是", "从前，有一只小狐狸", "在计算机里，", "The capital of France is",
              "Once upon a time, there was", "In the winter, the")
TEST_BATCH = 32  # questions answered together


class Chat:
    """A model and its tokenizer on a device: text in, text out."""

    def __init__(self, args: argparse.Namespace):
        path = find_weights(args.weight, args.out_dir)
        self.device = choose_device(args.device)
        self.dtype = choose_dtype(args.dtype, self.device)
        self.model, about = load_model(path)
        self.model.to(self.device).eval()
        self.tokenizer = Tokenizer()
        if self.tokenizer.vocab_size != self.model.config.vocab_size:
            raise WeightsError(f"{path}: made for {self.model.config.vocab_size} tokens, but the "
                               f"tokenizer has {self.tokenizer.vocab_size}")
        if about.get("tokenizer_hash", self.tokenizer.hash) != self.tokenizer.hash:
            print(f"{path}: trained with another tokenizer.json; expect nonsense", file=sys.stderr)
        self.continues_text = about.get("stage", path.stem.split("_")[0]) == "pretrain"
        self.max_new_tokens, self.seed = args.max_new_tokens, args.seed
        self.sampling = args.sampling
        print(f"{path.name}: {self.model.num_parameters():,} parameters, step "
              f"{about.get('step', 'unknown')}, on {self.device}")

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt: a conversation up to the reply, or the beginning of a text.

        The oldest messages are left out if the model has no positions for them all.
        """
        if self.continues_text:
            return [BOS_ID, *self.tokenizer.encode(messages[-1]["content"])]
        room = self.model.config.max_position_embeddings - self.max_new_tokens
        while True:
            ids, _ = self.tokenizer.render_chat(messages, reply_follows=True)
            if len(ids) <= room or len(messages) == 1:
                return ids
            messages = messages[2:] if len(messages) > 2 else messages[1:]

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The reply, in pieces as they become certain. Raises DataError for a prompt too long."""
        decoder = self.tokenizer.streaming_decoder()
        try:
            with autocast(self.device, self.dtype):
                for [token] in generate(self.model, [self.prompt_ids(messages)],
                                        self.max_new_tokens, self.sampling, STOP_IDS, self.seed):
                    yield decoder.push(token)
        except ValueError as error:
            raise DataError(str(error)) from None
        yield decoder.finish()

    def replies(self, questions: list[str]) -> list[str]:
        """Greedy replies to many questions at once."""
        prompts = [self.prompt_ids([{"role": "user", "content": text}]) for text in questions]
        try:
            with autocast(self.device, self.dtype):
                outputs = generate_all(self.model, prompts, self.max_new_tokens,
                                       Sampling(temperature=0), STOP_IDS)
        except ValueError as error:
            raise DataError(str(error)) from None
        return [self.tokenizer.decode(ids) for ids in outputs]


def say(chat: Chat, messages: list[dict[str, str]], stoppable: bool = False) -> str:
    """Prints a reply as it comes and returns it. If stoppable, Ctrl-C ends only the reply."""
    reply, begun, pieces = "", time.perf_counter(), 0
    try:
        for piece in chat.stream(messages):
            print(piece, end="", flush=True)
            reply, pieces = reply + piece, pieces + 1
    except KeyboardInterrupt:
        if not stoppable:
            raise
        print(" [stopped]", end="")
    print(f"\n[{pieces / (time.perf_counter() - begun):.0f} tokens/s]\n" if sys.stdout.isatty()
          else "\n")
    return reply


def answer_all(chat: Chat, questions: tuple[str, ...]) -> dict:
    """Answers questions one by one, each on its own."""
    answers = []
    for question in questions:
        print(question if chat.continues_text else f"> {question}",
              end="" if chat.continues_text else "\n", flush=True)
        reply = say(chat, [{"role": "user", "content": question}])
        answers.append({"prompt": question, "reply": reply})
    return {"answers": answers}


def interact(chat: Chat) -> dict:
    """Reads lines until the end of input; a conversation remembers what was said."""
    prompt = "> " if sys.stdin.isatty() else ""
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = clean_surrogates(input(prompt)).strip()
        except (EOFError, KeyboardInterrupt):
            return {"messages": messages}
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            reply = say(chat, messages, stoppable=True)
        except DataError as error:
            print(error)
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": reply})


def parse_question(record: dict) -> dict[str, str]:
    """A test line: question and answer, and perhaps a topic."""
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f'no "{key}" (a non-empty string)')
    if not isinstance(record.get("topic", ""), str):
        raise ValueError('"topic" is not a string')
    return {"question": clean_surrogates(record["question"]),
            "answer": clean_surrogates(record["answer"]), "topic": record.get("topic", "all")}


def normalised(text: str) -> str:
    """What counts when a reply is compared: not case, spaces, nor marks at either end."""
    return "".join(text.casefold().split()).strip(".。!！?？,，;；:：\"'“”")


def percent(results: list[bool]) -> float:
    return 100 * sum(results) / max(len(results), 1)


def score(chat: Chat, path: Path) -> dict:
    """Generates a greedy reply to each question of a file and compares it with the answer."""
    records = [record for _, record in JsonlReader(path, parse_question)]
    by_topic: dict[str, list[bool]] = {}
    wrong = []
    for start in tqdm(range(0, len(records), TEST_BATCH), disable=None, unit="batch"):
        batch = records[start : start + TEST_BATCH]
        for record, reply in zip(batch, chat.replies([record["question"] for record in batch])):
            right = normalised(reply) == normalised(record["answer"])
            by_topic.setdefault(record["topic"], []).append(right)
            if not right:
                wrong.append({"question": record["question"], "answer": record["answer"],
                              "reply": reply})
    for miss in wrong[:10]:
        print(f"  wrong: {miss['question']} -> {miss['reply']!r}, expected {miss['answer']!r}")
    for topic, results in by_topic.items():
        print(f"{topic:20s} {sum(results):4d} of {len(results):4d}")
    arithmetic = by_topic.pop("arithmetic", [])
    rest = [right for results in by_topic.values() for right in results]
    apart = f", arithmetic apart: {percent(arithmetic):.1f} %" if arithmetic else ""
    print(f"score: {percent(rest):.1f} % ({len(rest)} questions{apart})")
    return {"score": percent(rest), "questions": len(rest), "arithmetic": percent(arithmetic),
            "wrong": wrong}


def measure(chat: Chat, path: Path) -> dict:
    """Loss over a data file; each document is taken whole, up to max_position_embeddings."""
    for _ in JsonlReader(path, parse_any):
        pass  # a fault in the last line is found now, not after the others were measured
    longest = chat.model.config.max_position_embeddings

    def one_by_one():
        for _, (stage, example) in tqdm(JsonlReader(path, parse_any), disable=None, unit="doc"):
            [document] = stage.encode(chat.tokenizer, [example])
            positions = min(len(document.ids) - 1, longest)
            mask = None if document.loss_mask is None else np.array(document.loss_mask)
            piece = make_piece(np.array(document.ids), mask, document.text_bytes, 0, positions)
            # One whole document needs no mask between documents.
            yield TokenBudgetCollate(positions)([[piece]])._replace(doc_ids=None)

    metrics = evaluate(chat.model, one_by_one(), longest, chat.device, chat.dtype)
    print(f"loss {metrics['loss']:.4f} | perplexity {metrics['ppl']:.3f} | bits per byte "
          f"{metrics['bpb']:.4f} | {metrics['tokens']:,} tokens, {metrics['bytes']:,} bytes")
    print(f"perplexity {metrics['ppl']:.3f} is {'' if metrics['ppl'] < 3 else 'not '}below 3.0")
    return {"perplexity" if key == "ppl" else key: value for key, value in metrics.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Chat with a trained model, test it, or measure its loss.", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--weight", default="full_sft", help="a file, or a name in --out_dir")
    parser.add_argument("--out_dir", default="out", help="folder of the weights")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--interactive", action="store_true", help="chat, until the end of input")
    what.add_argument("--prompt", help="answer this one")
    what.add_argument("--test", metavar="FILE", help="score {question, answer, topic} lines")
    what.add_argument("--data_path", metavar="FILE", help="report loss and bits per byte of JSONL")
    parser.add_argument("--json", action="store_true",
                        help="the last line of output is one JSON object with the results")
    parser.add_argument("--temperature", type=float, default=0.85, help="0 = greedy")
    parser.add_argument("--top_p", type=float, default=0.85, help="probability mass, 1 = all")
    parser.add_argument("--top_k", type=int, default=0, help="most likely tokens, 0 = all")
    parser.add_argument("--repetition_penalty", type=float, default=1.05, help="1 = off")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="tokens in a reply at most")
    parser.add_argument("--seed", type=int, default=None, help="same seed, same reply")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps, cpu")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto",
                        help="of matrix products")
    args = parser.parse_args()
    for name in ("out_dir", "test", "data_path"):
        given = getattr(args, name)
        if given is not None:
            setattr(args, name, find_path(given, parser.get_default(name)))
    if args.prompt is not None:
        args.prompt = clean_surrogates(args.prompt)
    try:
        args.sampling = Sampling(args.temperature, args.top_p, args.top_k, args.repetition_penalty)
    except ValueError as error:
        parser.error(str(error))
    if args.seed is not None and not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: expected from 0 to below 2^63")
    if args.max_new_tokens < 1:
        parser.error(f"--max_new_tokens {args.max_new_tokens}: expected at least 1")
    return args


def main():
    args = parse_arguments()
    chat = Chat(args)
    if args.test:
        result = score(chat, args.test)
    elif args.data_path:
        result = measure(chat, args.data_path)
    elif args.interactive:
        result = interact(chat)
    elif args.prompt is not None:
        result = answer_all(chat, (args.prompt,))
    else:
        result = answer_all(chat, BEGINNINGS if chat.continues_text else QUESTIONS)
    if args.json:
        print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    # A terminal without Chinese shows "?" for it; half a character, pasted, is not the end.
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):  # the real ones have it
            stream.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output (`| head`, say) has seen enough
        sys.stderr.close()
        sys.exit(1)
    except (DataError, DeviceError, WeightsError) as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
