"""Encodes conversations, one tokenizer after the other, and prints what came of them: run on two commits.

    python -m proofs.chat_ids ids      the jobs in one line in; for each, two lists out: an item for each conversation,
                                       its ids or a sentence
    python -m proofs.chat_ids clock    the same line in; then a chat for each line, and its milliseconds out

Speaks to classes that both commits have; the commit before is given a copy with the names its modules had.
"""

import json
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from proofs import chat_samples
from quire.checkpoints import load_tokenizer
from quire.client.text_model import TextModel
from quire.errors import QuireError
from quire.text.chat.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

LONGEST = 1 << 20


def text_model(job: dict[str, Any]) -> TextModel:
    tokenizer = Tokenizer(load_tokenizer(Path(job["tokenizer_file"])), 8 * LONGEST)
    template = ChatTemplate(job["template"], job["special_tokens"])
    sizes: dict[str, Any] = {"vocabulary_size": tokenizer.vocabulary_size, "max_sequence_tokens": LONGEST}
    if "info" in TextModel.__dataclass_fields__:  # where a model's sizes stand today
        sizes = {"info": SimpleNamespace(**sizes, notes=())}
    return TextModel(
        name=job["name"], tokenizer=tokenizer, template=template, eos_token_ids=frozenset({0}), defaults={}, **sizes
    )


def outcome(model: TextModel, chat: dict[str, Any]) -> list[int] | str:
    try:
        return model.chat(**chat)
    except QuireError as error:
        return f"{type(error).__name__}: {error}"


def ids(job: dict[str, Any]) -> list[list[list[int] | str]]:
    """Of conversations with names of control tokens, and of ordinary ones."""
    model = text_model(job)
    hostile = [chat_samples.hostile(Random(seed), job["names"]) for seed in job["hostile"]]
    ordinary = [chat_samples.ordinary(Random(seed)) for seed in job["ordinary"]]
    return [[outcome(model, chat) for chat in chats] for chats in (hostile, ordinary)]


def clock(jobs: list[dict[str, Any]]) -> None:
    """Time chats one by one: a line `job seed` in, milliseconds out."""
    models = [text_model(job) for job in jobs]
    print("ready", flush=True)
    for line in sys.stdin:
        job, seed = map(int, line.split())
        chat = chat_samples.twenty(Random(seed))
        start = time.perf_counter()
        models[job].chat(**chat)
        print(1e3 * (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    if sys.argv[1] == "clock":
        clock(given)
    else:
        print(json.dumps([ids(job) for job in given]))
