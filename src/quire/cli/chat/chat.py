"""`quire chat`: a conversation in the terminal. Ctrl-C stops an answer, not the program."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.chat.answer_printer import Spoken
from quire.cli.chat.generate import summary
from quire.cli.chat.open_model import opened
from quire.cli.shared.settings_flags import with_settings
from quire.config import Settings
from quire.config.home import expanded
from quire.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from quire.cli.chat.remote import Remote
    from quire.client.engines.llm import LLM
    from quire.client.reply.outputs import Completion, Piece
    from quire.client.request.params import SamplingParams

HELP = """\
/system TEXT   set the system message and begin anew
/save FILE     write the conversation as JSON
/stats         what the conversation has cost so far
/reset         begin anew
/exit          leave (so does Ctrl-D)
Ctrl-C         stop the answer that is being written"""


@with_settings
def chat(
    settings: Settings,
    model: Annotated[
        str | None, typer.Argument(help="A directory, a .gguf file, or a hub id; with --url a name the server knows.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk with a server, such as http://127.0.0.1:8000.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's API key.", show_envvar=True)
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest; default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that hold this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
) -> None:
    """Talk with a model."""
    from quire.client.request.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if url is not None:
        from quire.cli.chat.remote import Remote

        remote = Remote.at(url, model, key)
        typer.echo(f"talking with {remote.model} at {remote.url}", err=True)
        talk_in_terminal(Talk(remote, params, system))
        return
    if model is None:
        raise ConfigError("a model must be named, or a server with --url; none given")
    with opened(model, settings) as llm:
        if llm.text.template is None:
            raise ConfigError("this model has no chat template; use quire generate, or a model made for chatting")
        talk_in_terminal(Talk(llm, params, system))


def talk_in_terminal(talk: "Talk") -> None:
    """Until the person leaves."""
    typer.echo("say something; /help shows what else", err=True)
    for line in _lines():
        if not talk.hear(line):
            break


@dataclass
class Talk:
    """A conversation and what it has cost."""

    llm: "LLM | Remote"
    params: "SamplingParams"
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    completions: "list[Completion]" = field(default_factory=list)

    def hear(self, line: str) -> bool:
        """Obey a command or answer; false ends the conversation."""
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
                typer.echo("system message set, conversation begun anew", err=True)
            case "/reset":
                self.turns = []
                typer.echo("conversation begun anew", err=True)
            case "/save":
                self._save(rest.strip())
            case "/stats":
                self._print_stats()
            case _ if command.startswith("/"):
                typer.echo(f"error: no command {command}\nhint: /help lists them", err=True)
            case _:
                self._answer(line)
        return True

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as a template takes it."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def _answer(self, line: str) -> None:
        from quire.errors import QuireError

        self.turns.append({"role": "user", "content": line})
        try:
            completion = self._stream()
        except QuireError as error:
            self.turns.pop()
            typer.echo(f"error: {error}\nhint: /reset begins anew", err=True)
            return
        self.completions.append(completion)
        typer.echo()
        typer.echo(summary(completion), err=True)
        if (error_text := completion.answers[0].error) is not None:
            self.turns.pop()
            typer.echo(f"error: {error_text}\nhint: ask in other words, or /reset", err=True)
            return
        self.turns.append({"role": "assistant", "content": completion.text})

    def _stream(self) -> "Completion":
        """Write an answer as it comes; a stopped one counts as far as it went."""
        from quire.client.reply.outputs import Completion

        spoken = Spoken()
        with _interrupts() as pressed:
            for piece in self._pieces(lambda: bool(pressed)):
                if isinstance(piece, Completion):
                    spoken.end()
                    if pressed:
                        typer.echo("\n(stopped)", err=True)
                    return piece
                spoken.say(piece)
        raise InvariantError("a stream ended without a completion")

    def _pieces(self, is_stopped: "Callable[[], bool]") -> "Iterator[Piece | Completion]":
        from quire.cli.chat.remote import Remote

        if isinstance(self.llm, Remote):
            return self.llm.stream_chat(self.messages, self.params, is_stopped)
        from quire.client.request.conversation import converse

        asked = converse(self.llm.text, self.messages)
        return self.llm.stream(asked.ids, asked.applied(self.params), is_stopped=is_stopped)

    def _save(self, name: str) -> None:
        if not name:
            typer.echo("error: /save needs a file name\nhint: /save talk.json", err=True)
            return
        try:
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
            expanded(name, "name the file by its full path").write_text(text, encoding="utf-8")
            typer.echo(f"saved {len(self.messages)} messages to {name}", err=True)
        except (OSError, ConfigError) as error:
            typer.echo(f"error: {error}\nhint: choose another file", err=True)

    def _print_stats(self) -> None:
        done = self.completions
        prompt, cached = sum(len(one.prompt_token_ids) for one in done), sum(one.num_cached_tokens for one in done)
        output, seconds = sum(one.num_output_tokens for one in done), sum(one.timings.total_s for one in done)
        typer.echo(
            f"{len(done)} answers, {output} tokens in {seconds:.1f} s; {cached} of {prompt} prompt tokens cached",
            err=True,
        )


def _lines() -> Iterator[str]:
    """What the person types, with the arrow keys working; Ctrl-C clears a line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what makes the keys work
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
    """Note Ctrl-C instead of raising it: a step must never be torn in the middle. The second one leaves the program."""
    pressed: list[bool] = []

    def note(*_: object) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
