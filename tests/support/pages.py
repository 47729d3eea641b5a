"""Finds what is wrong in the documents: links, anchors, commands, options, variables, targets, names of files.

make proof-house ONLY=documents        counts it as `broken_pages`
"""

import os
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import typer

from quire import cli
from quire.cli.agents.agent_clients import KEY_VARIABLE
from quire.config import SETTINGS
from quire.config.sources import OTHER_VARIABLES

ROOT = Path(__file__).parents[2]
SKIPPED_FOLDERS = {"build", "dist", "node_modules", "__pycache__"}
CODE = (".py", ".cpp", ".hpp", ".mjs", ".js", ".sh")
LINKS_ONLY = "CHANGELOG.md"
"""Its lines name options and files of their time."""
FOREIGN_PATHS = {"adapters/", "fused_model/", "FAST25-release/traces/"}
"""Folders of other projects."""
FOREIGN_OPTIONS = {"--build-arg", "--cpus", "--num-cpus", "--enable-prompt-tokens-details"}
"""Options of docker, Ray and vLLM that stand alone in backticks."""
FOREIGN_OPTION_PAGES = ("docs/guides/agents/", "docs/reference/glossary.md")
"""Pages about options of other programs."""
OTHER_NAMES = {*OTHER_VARIABLES, KEY_VARIABLE}
"""Variables that are neither settings nor read by an option: the last is read by the kernels."""

FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|href)=\"([^\"]+)\"|^\[[^]]+\]:\s*(\S+)", re.MULTILINE)
LABEL = re.compile(r"\[([\w./-]+)\]\(")
EXTRA = re.compile(r"(?:quire|['\"]\.)\[(\w+)\]")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
CITED = "#:~:text="
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
JSON_TYPE = "content-type: application/json"
VARIABLE = re.compile(r"\bQUIRE_[A-Z_]*[A-Z]")
OPERATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<"}


@dataclass(frozen=True)
class Repository:
    """A tree of files, and what else the documents may name."""

    root: Path
    variables: frozenset[str]
    command_error: Callable[[Sequence[str], bool], str]
    """What is wrong with the words of a command, which is complete or only mentioned; empty if nothing."""
    options: frozenset[str]

    @cached_property
    def paths(self) -> frozenset[str]:
        """All files and folders, also by the ends of their names and without their last suffix: `core/step.py` and
        `core/step` for src/quire/core/step.py."""
        found = set[str]()
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
            parts = Path(folder).relative_to(self.root).parts
            for name in (*folders, *files):
                for at in range(len(parts) + 1):
                    path = PurePosixPath(*parts[at:], name)
                    found |= {str(path), str(path.with_suffix(""))}
        return frozenset(found)

    @cached_property
    def rooms(self) -> frozenset[str]:
        """Folders at the top of the repository and of the package."""
        tops = (self.root, self.root / "src" / "quire")
        return frozenset(path.name for top in tops if top.is_dir() for path in top.iterdir() if path.is_dir())

    @cached_property
    def targets(self) -> frozenset[str]:
        """Targets of the Makefile."""
        return frozenset(re.findall(r"^([\w-]+):", (self.root / "Makefile").read_text(), re.MULTILINE))

    @cached_property
    def extras(self) -> frozenset[str]:
        """Extras of the package."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]
        return frozenset(project["optional-dependencies"])


def this_repository() -> Repository:
    """This one, with the commands and the settings of the installed package."""
    commands = list(_commands())
    keys = (name for command in commands for one in command.params for name in _names(one.envvar))
    variables = {*(one.variable for one in SETTINGS), *OTHER_NAMES, *keys}
    options = {*FOREIGN_OPTIONS, *(name for command in commands for name in _options(command))}
    return Repository(ROOT, frozenset(variables), command_error, frozenset(options))


def documents(root: Path = ROOT) -> list[Path]:
    """Every page of the repository, and what else people deploy or copy."""
    pages = [*root.rglob("*.md"), *(path for name in ("deploy", "examples") for path in (root / name).rglob("*"))]
    return sorted({path for path in pages if path.is_file() and not _is_hidden(path.relative_to(root))})


def broken(repository: Repository, pages: Iterable[Path]) -> list[str]:
    """What is wrong in these pages, a line for each: the page, what stands there, and why it is wrong."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8", errors="replace")
        name = page.relative_to(repository.root)
        found += [f"{name}: {why}" for why in _wrong_in(repository, page, text)]
    return found


def _wrong_in(repository: Repository, page: Path, text: str) -> Iterator[str]:
    is_page = page.suffix == ".md"
    blocks = [(match[2], match[3]) for match in FENCED.finditer(text)] if is_page else []
    prose = FENCED.sub("", text) if is_page else ""
    yield from _wrong_links(page, prose)
    if page.name == LINKS_ONLY:
        return
    spans = [" ".join(span.split()) for span in SPAN.findall(prose)]
    drawn = [word for language, block in blocks if not language for word in re.findall(r"[\w./-]+", block)]
    yield from _wrong_variables(repository, text)
    yield from _wrong_targets(repository, [*spans, *(line for _, block in blocks for line in block.splitlines())])
    yield from _wrong_paths(
        repository, [*spans, *(word for word in (*drawn, *LABEL.findall(prose)) if word.endswith(CODE))]
    )
    yield from (f"[{name}]: no such extra" for name in EXTRA.findall(text) if name not in repository.extras)
    if not str(page.relative_to(repository.root)).startswith(FOREIGN_OPTION_PAGES):
        yield from _wrong_options(repository, spans)
    yield from _wrong_commands(repository, spans, is_complete=False)
    yield from _wrong_commands(repository, _console_lines(blocks), is_complete=True)


# -- links -------------------------------------------------------------------------------------------------------------


def _wrong_links(page: Path, prose: str) -> Iterator[str]:
    plain = SPAN.sub("", prose)
    for link in (next(filter(None, groups)) for groups in LINK.findall(plain)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, cited = link.partition(CITED)
        target, _, anchor = target.partition("#")
        path = page.parent / target if target else page
        if not path.exists():
            yield f"({link}): no such file"
        elif cited and unquote(cited) not in path.read_text():
            yield f"({link}): the cited text is not in that file"
        elif anchor and anchor not in anchors(path.read_text()):
            yield f"({link}): no such heading"


def anchors(page: str) -> set[str]:
    """What links to this page may point to, by GitHub's rule for headings."""
    counts = Counter[str]()
    found = set(ANCHOR.findall(page))
    for heading in HEADING.findall(FENCED.sub("", page)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


# -- names -------------------------------------------------------------------------------------------------------------


def _wrong_variables(repository: Repository, text: str) -> Iterator[str]:
    for name in sorted(set(VARIABLE.findall(text)) - repository.variables):
        yield f"{name}: no such setting or variable"


def _wrong_targets(repository: Repository, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        for name in re.findall(r"^(?:\$ )?make ([a-zA-Z][\w-]*)(?!=)", line.strip()):
            if "NAME" not in name and name not in repository.targets:
                yield f"make {name}: no such target"


def _wrong_paths(repository: Repository, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        is_ours = PATH.fullmatch(name) and name not in FOREIGN_PATHS and _is_of_a_repository(repository, name)
        if is_ours and name.rstrip("/") not in repository.paths:
            yield f"{name}: no such file"


def _is_of_a_repository(repository: Repository, name: str) -> bool:
    """Whether a word looks like a file or folder of this repository, and is no placeholder (`api/dialects/NAME/`)."""
    if "NAME" in name:
        return False
    return name.endswith((*CODE, "/")) or ("/" in name and name.partition("/")[0] in repository.rooms)


# -- commands ----------------------------------------------------------------------------------------------------------


def _wrong_options(repository: Repository, spans: Iterable[str]) -> Iterator[str]:
    for span in spans:
        name = re.split(r"[ =]", span)[0]
        if re.fullmatch(r"--[a-z][\w-]*", name) and name not in repository.options:
            yield f"{name}: no such option"


def _console_lines(blocks: Iterable[tuple[str, str]]) -> Iterator[str]:
    for _, block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith("$ "):
                yield line.strip().removeprefix("$ ")


def _wrong_commands(repository: Repository, lines: Iterable[str], *, is_complete: bool) -> Iterator[str]:
    for line in lines:
        for words in _programs(line):
            if words[0] == "quire" and (why := repository.command_error(words[1:], is_complete)):
                yield f"{line}: {why}"
            if (
                words[0] == "curl"
                and {"-d", "--data"} & {*words}
                and "content-type: application/json" not in line.lower()
            ):
                yield f"{line}: no content type; a server without keys returns 415"


def _programs(line: str) -> Iterator[list[str]]:
    """The words of each program of a line of a shell, without variables before it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that does not end: no line of a shell
        return
    program = list[str]()
    for word in (*words, ";"):
        if word in OPERATORS:
            if program:
                yield program
            program = []
        elif program or not re.match(r"[A-Z_]+=", word):
            program.append(word)


def command_error(words: Sequence[str], is_complete: bool) -> str:
    """What is wrong with `quire WORDS`, by the commands of the installed package; empty if nothing."""
    command: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while _is_group(command) and rest and not rest[0].startswith("-"):
        child = command.get_command(typer.Context(command), rest[0])
        if child is None:
            return f"quire has no command {rest[0]}"
        command, rest = child, rest[1:]
    options, num_values = _options(command), 0
    while rest:
        word = rest.pop(0)
        if word == "--":
            num_values += len(rest)
            break
        name, equals, _ = word.partition("=")
        if not re.match(r"--?[a-z]", name):
            num_values += 1
        elif name not in options:
            return f"no option {name}"
        elif not equals and not options[name].is_flag:
            if is_complete and not rest:
                return f"{name} needs a value"
            rest = rest[1:]
    return _count_error(command, num_values) if is_complete else ""


def _count_error(command: Any, num_values: int) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    least = sum(one.required for one in arguments)
    is_open = any(one.nargs == -1 for one in arguments)
    if num_values < least:
        return f"expected at least {least} arguments, got {num_values}"
    return "" if is_open or num_values <= len(arguments) else f"expected {len(arguments)} arguments, got {num_values}"


def _commands() -> Iterator[Any]:
    """Every command and group."""
    waiting: list[Any] = [typer.main.get_command(cli.app)]
    while waiting:
        command = waiting.pop()
        yield command
        if _is_group(command):
            context = typer.Context(command)
            waiting += [command.get_command(context, name) for name in command.list_commands(context)]


def _is_group(command: Any) -> bool:
    return hasattr(command, "list_commands")


def _options(command: Any) -> dict[str, Any]:
    """Options of a command by all their spellings."""
    params = command.get_params(typer.Context(command))
    return {name: one for one in params if one.param_type_name == "option" for name in (*one.opts, *one.secondary_opts)}


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in SKIPPED_FOLDERS for part in path.parts)


def _names(variable: str | Sequence[str] | None) -> Sequence[str]:
    """Of an option that is read from environment variables."""
    return [variable] if isinstance(variable, str) else variable or ()
