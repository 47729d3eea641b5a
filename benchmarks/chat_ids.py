"""Encodes conversations, one tokenizer after the other, and prints what came of them: run on two commits.

    python chat_ids.py ids|time < jobs.json      (quire is imported from wherever the interpreter finds it)

Speaks to classes that both commits have. The last line is JSON: for each job two lists with an item for each
conversation (its ids, or a sentence), or one with an item for each round (milliseconds).
"""

import json
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import chat_samples
from quire.checkpoints import load_tokenizer
from quire.engine.chat_template import ChatTemplate
from quire.engine.text import Tokenizer
from quire.engine.text_model import TextModel
from quire.errors import QuireError

LONGEST = 1 << 20


def text_model(job: dict[str, Any]) -> TextModel:
    tokenizer = Tokenizer(load_tokenizer(Path(job["tokenizer_file"])), 8 * LONGEST)
    template = ChatTemplate(job["template"], job["special_tokens"])
    size = tokenizer.vocabulary_size
    return TextModel(job["name"], tokenizer, template, frozenset({0}), {}, size, LONGEST)


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


def milliseconds(job: dict[str, Any]) -> list[float]:
    """The median of each round."""
    model, told = text_model(job), []
    for seed in job["seeds"]:
        chat = chat_samples.twenty(Random(seed))
        took = []
        for _ in range(25):
            start = time.perf_counter()
            model.chat(**chat)
            took.append(1e3 * (time.perf_counter() - start))
        told.append(statistics.median(took))
    return told


if __name__ == "__main__":
    work = {"ids": ids, "time": milliseconds}[sys.argv[1]]
    print(json.dumps([work(job) for job in json.load(sys.stdin)]))
