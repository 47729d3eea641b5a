"""`quire chat`: a conversation in the terminal. Ctrl-C stops the current response, not the program."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.chat.generate import AnswerPrinter, open_llm, summary
from quire.cli.shared.flags import with_settings
from quire.config import Settings
from quire.config.home import expand_home
from quire.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from quire.cli.chat.remote import Remote
    from quire.client.engines.llm import LLM
    from quire.client.reply.outputs import Completion, Piece
    from quire.client.request.params import SamplingParams

BAR_LABEL = "computing the prompt"
HELP = """\
/system TEXT   set the system message and start over
/save FILE     write the conversation as JSON
/stats         show tokens and time of the conversation
/reset         start over
/exit          quit (same as Ctrl-D)
Ctrl-C         stop the current response"""


@with_settings
def chat(
    settings: Settings,
    model: Annotated[
        str | None, typer.Argument(help="A directory, a .gguf file, or a hub id; with --url a model of the server.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Chat with a server, such as http://127.0.0.1:8000.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's API key.", show_envvar=True)
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per response.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same responses.")] = None,
) -> None:
    """Chat with a model."""
    from quire.client.request.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if url is not None:
        from quire.cli.chat.remote import Remote

        remote = Remote.connect(url, model, key)
        typer.echo(f"chatting with {remote.model} at {remote.url}", err=True)
        talk_in_terminal(ChatSession(remote, params, system))
        return
    if model is None:
        raise ConfigError("expected a MODEL, or a server with --url, got neither")
    chat_with(model, settings, params, system)


def chat_with(model: str, settings: Settings, params: "SamplingParams", system: str | None = None) -> None:
    """Load a model in this process and chat with it. Raises ConfigError if it has no chat template."""
    with open_llm(model, settings) as llm:
        if llm.text.template is None:
            message = "this model has no chat template; use quire generate, or a chat model"
            raise ConfigError(message, code="template_missing")
        talk_in_terminal(ChatSession(llm, params, system))


def talk_in_terminal(session: "ChatSession") -> None:
    """Chat until the user quits."""
    typer.echo("type a message; /help lists the commands", err=True)
    for line in _lines():
        if not session.handle(line):
            break


@dataclass
class ChatSession:
    """A conversation with a model, and the completions so far, for `/stats`."""

    llm: "LLM | Remote"
    params: "SamplingParams"
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    completions: "list[Completion]" = field(default_factory=list)

    def handle(self, line: str) -> bool:
        """Run a command or generate a response; False ends the conversation."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/help":
                typer.echo(HELP, err=True)
            case "/system":
                self.system, self.turns = rest or None, []
                typer.echo("system message set, conversation restarted", err=True)
            case "/reset":
                self.turns = []
                typer.echo("conversation restarted", err=True)
            case "/save":
                self._save(rest.strip())
            case "/stats":
                self._print_stats()
            case _ if command.startswith("/"):
                typer.echo(f"error: unknown command {command}\nhint: /help lists the commands", err=True)
            case _:
                self._answer(line)
        return True

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def _answer(self, line: str) -> None:
        from quire.errors import QuireError

        self.turns.append({"role": "user", "content": line})
        try:
            completion = self._stream()
        except QuireError as error:
            self.turns.pop()
            typer.echo(f"error: {error}\nhint: /reset starts over", err=True)
            return
        self.completions.append(completion)
        typer.echo()
        typer.echo(summary(completion), err=True)
        if (error_text := completion.answers[0].error) is not None:
            self.turns.pop()
            typer.echo(f"error: {error_text}\nhint: try a different prompt, or /reset", err=True)
            return
        self.turns.append({"role": "assistant", "content": completion.text})

    def _stream(self) -> "Completion":
        """Print a response as it arrives, and return it; a stopped response is returned as far as it was generated."""
        from quire.client.reply.outputs import Completion

        printer = AnswerPrinter()
        with _interrupts() as interrupts, prompt_bar() as show_bar:
            for piece in self._pieces(lambda: bool(interrupts), show_bar):
                show_bar(1, 1)
                if isinstance(piece, Completion):
                    printer.end()
                    if interrupts:
                        typer.echo("\n(stopped)", err=True)
                    return piece
                printer.write(piece)
        raise InvariantError("a stream ended without a completion")

    def _pieces(
        self, is_stopped: Callable[[], bool], on_progress: Callable[[int, int], None]
    ) -> "Iterator[Piece | Completion]":
        from quire.cli.chat.remote import Remote

        if isinstance(self.llm, Remote):
            return self.llm.stream_chat(self.messages, self.params, is_stopped, on_progress)
        from quire.client.request.conversation import converse

        conversation = converse(self.llm.text, self.messages)
        params = conversation.apply_to(self.params)
        return self.llm.stream(conversation.ids, params, is_stopped=is_stopped, on_progress=on_progress)

    def _save(self, name: str) -> None:
        if not name:
            typer.echo("error: /save needs a file name\nhint: /save chat.json", err=True)
            return
        try:
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
            expand_home(name, "name the file by its full path").write_text(text, encoding="utf-8")
            typer.echo(f"saved {len(self.messages)} messages to {name}", err=True)
        except (OSError, ConfigError) as error:
            typer.echo(f"error: {error}\nhint: choose another file", err=True)

    def _print_stats(self) -> None:
        done = self.completions
        prompt, cached = sum(len(turn.prompt_token_ids) for turn in done), sum(turn.num_cached_tokens for turn in done)
        output, seconds = sum(turn.num_output_tokens for turn in done), sum(turn.timings.total_s for turn in done)
        typer.echo(
            f"{len(done)} responses, {output} tokens in {seconds:.1f} s; {cached} of {prompt} prompt tokens cached",
            err=True,
        )


@contextmanager
def prompt_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows a bar of a prompt's computed tokens; the bar is removed when all are computed, at the
    latest at the end of the block. Without a terminal nothing is shown."""
    from quire.checkpoints.progress import BARS

    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    try:
        yield lambda done, total: BARS.show(BAR_LABEL, done, total)
    finally:
        BARS.end(BAR_LABEL)


def _lines() -> Iterator[str]:
    """Yield lines typed by the user. Arrow keys work, Ctrl-C clears the line, Ctrl-D ends the iteration."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - the import makes arrow keys work in input()
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            typer.echo(err=True)
        except EOFError:
            typer.echo(err=True)
            return


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Record the first Ctrl-C, because a step must not be interrupted; a second Ctrl-C interrupts the program."""
    interrupts: list[bool] = []

    def record(*_: object) -> None:
        interrupts.append(True)
        signal.signal(signal.SIGINT, old_handler)

    old_handler = signal.signal(signal.SIGINT, record)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, old_handler)
