"""`quire generate`: stream the output for one prompt to stdout; messages go to stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.flags import with_settings
from quire.config import Settings

if TYPE_CHECKING:
    from quire.client.engines.llm import LLM
    from quire.client.reply.outputs import Completion, Piece


@with_settings
def generate(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, or a hub id.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same output.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Generate output for one prompt."""
    from quire.client.reply.outputs import Completion
    from quire.client.request.conversation import converse
    from quire.client.request.params import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    with open_llm(model, settings) as llm:
        if chat:
            conversation = converse(llm.text, [{"role": "user", "content": text}])
            ids, params = conversation.ids, conversation.apply_to(params)
        else:
            ids = llm.text.prompt(text)
        printer = AnswerPrinter()
        for piece in llm.stream(ids, params):
            if isinstance(piece, Completion):
                printer.end()
                _print_end(piece, as_json)
            elif not as_json:
                printer.write(piece)


def _print_end(completion: "Completion", as_json: bool) -> None:
    from json import dumps

    if as_json:
        answer = completion.answers[0]
        fields = {
            "text": answer.text,
            "reasoning": answer.reasoning,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "error": answer.error,
            "prompt_tokens": len(completion.prompt_token_ids),
            "cached_tokens": completion.num_cached_tokens,
            "seed": completion.seed,
            "first_token_s": round(completion.timings.first_token_s, 4),
            "total_s": round(completion.timings.total_s, 4),
        }
        typer.echo(dumps(fields, ensure_ascii=False))
        return
    typer.echo()
    typer.echo(summary(completion), err=True)
    if (error := completion.answers[0].error) is not None:
        typer.echo(f"error: {error}\nhint: try another prompt, another seed, or another copy of the model", err=True)
        raise typer.Exit(1)


def summary(completion: "Completion") -> str:
    """Format one line about speed and cached tokens."""
    return (
        f"{completion.num_output_tokens} tokens, {completion.tokens_per_s:.1f} tokens/s, first after "
        f"{completion.timings.first_token_s:.2f} s, {completion.num_cached_tokens} of "
        f"{len(completion.prompt_token_ids)} prompt tokens cached, {completion.finish_reason}"
    )


@dataclass
class AnswerPrinter:
    """Prints a response as it arrives: reasoning to stderr, the answer to stdout."""

    is_thinking: bool = False

    def write(self, piece: "Piece") -> None:
        """Write one piece. Marker lines before and after reasoning separate it from the answer."""
        from quire.client.reply.outputs import ReasoningPart

        is_reasoning = isinstance(piece.part, ReasoningPart)
        if is_reasoning and piece.delta and not self.is_thinking:
            self.is_thinking = True
            typer.echo("(thinking)", err=True)
        if self.is_thinking and not is_reasoning:
            self.end()
        if piece.delta:
            typer.echo(piece.delta if is_reasoning else piece.text, nl=False, err=is_reasoning)

    def end(self) -> None:
        """Write the marker line at the end of reasoning, if reasoning was being written."""
        if self.is_thinking:
            typer.echo("\n(answering)", err=True)
        self.is_thinking = False


@contextmanager
def open_llm(model: str, settings: Settings) -> Iterator["LLM"]:
    """Load a model, with progress and a line about its capacity on stderr, and close it at the end of this context."""
    from quire.checkpoints import resolve
    from quire.checkpoints.progress import show_progress
    from quire.cli.shared.background import in_background
    from quire.cli.shared.machine_warnings import machine_warnings
    from quire.client.engines.llm import LLM
    from quire.client.engines.opening import open_model

    for warning in machine_warnings(settings.model):
        typer.echo(warning, err=True)
    with show_progress() as progress:
        checkpoint = in_background(lambda report: resolve(model, progress=report), progress).result()
        loaded = open_model(checkpoint, settings.model, serving=settings.serving, progress=progress)
    for line in (loaded.text.info.line, *loaded.text.notes):
        typer.echo(line, err=True)
    with LLM(loaded) as llm:
        yield llm
