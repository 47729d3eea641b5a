"""`quire generate`: the output for one prompt, streamed to stdout; messages go to stderr."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.chat.answer_printer import AnswerPrinter
from quire.cli.chat.open_model import opened
from quire.cli.shared.settings_flags import with_settings
from quire.config import Settings

if TYPE_CHECKING:
    from quire.client.reply.outputs import Completion


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
    with opened(model, settings) as llm:
        if chat:
            conversation = converse(llm.text, [{"role": "user", "content": text}])
            ids, params = conversation.ids, conversation.applied(params)
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
    """One line about speed and cache."""
    return (
        f"{completion.num_output_tokens} tokens, {completion.tokens_per_s:.1f} tokens/s, first after "
        f"{completion.timings.first_token_s:.2f} s, {completion.num_cached_tokens} of "
        f"{len(completion.prompt_token_ids)} prompt tokens cached, {completion.finish_reason}"
    )
