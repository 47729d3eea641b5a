"""What can be measured of a source tree by reading it: imports, names, words, lengths, lines of prose.

Pure functions over files. Nothing is imported from the tree that is measured. The exceptions are data: a committed
list, each with its reason.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

Graph = Mapping[str, set[str]]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
CODE = frozenset({".py", ".cpp", ".hpp", ".js", ".mjs"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One file of the tree, read and parsed."""

    name: str
    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def is_package(self) -> bool:
        """Whether it is a package's own file."""
        return self.path.name == "__init__.py"


def read_tree(root: Path) -> list[Module]:
    """All modules of the package `root`, such as src/quire, by name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return found


# -- imports -----------------------------------------------------------------------------------------------------------


def import_graph(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Which modules of the tree each one imports, at its top, inside functions or for the type checker alone."""
    known = {module.name for module in modules}
    return {module.name: set(_imported(module, known)) - {module.name} for module in modules}


def _imported(module: Module, known: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                if full in known:
                    yield full
                elif origin in known:
                    yield origin


def _origin(node: ast.ImportFrom, module: Module) -> str:
    """The module that stands behind `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*base, node.module] if node.module else base)


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """The same between the packages one level below the root. The root's own files are no package."""
    packages: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        home = _package(module)
        if home:
            packages[home] |= {_package(other) for other in imported} - {home, ""}
    return dict(packages)


def _package(module: str) -> str:
    return ".".join(module.split(".")[:2]) if "." in module else ""


def room_graph(graph: Graph, packages: Collection[str]) -> dict[str, set[str]]:
    """The same between folders that stand beside each other, at every depth.

    An import of `a.b.c.d` in `a.x.y` is one from `a.x` to `a.b`, if both are folders. A file that stands in `a` itself
    is above or below all of them: what it imports is no import between folders.
    """
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        for other in imported:
            here, there = module.split("."), other.split(".")
            depth = next((at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0)
            source, target = ".".join(here[: depth + 1]), ".".join(there[: depth + 1])
            if depth and source in packages and target in packages:
                rooms[source].add(target)
    return dict(rooms)


def circles(graph: Graph) -> list[list[str]]:
    """Groups of two or more that all import each other, by whatever way (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1:
                found.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exceptions:
    """The committed list of what is allowed, each with its reason."""

    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """A name, and the modules that may share it."""
    siblings: tuple[str, ...] = ()
    """Packages whose subpackages play the same part: files at the same place below them may share names."""
    commands: str = ""
    """The package of commands, where a command and its file have the name that a person types."""
    speech: frozenset[str] = frozenset()
    """Identifiers with words of speech that are libraries' own."""
    tables: frozenset[str] = frozenset()
    """Folders that are tables of like things, and may have more files than others."""
    uncounted: frozenset[str] = frozenset()
    """Sections of proofs whose time is not counted."""

    @classmethod
    def read(cls, path: Path) -> "Exceptions":
        """From the committed list. Raises ValueError for one without a reason."""
        data = tomllib.loads(path.read_text())
        for one in (*data.get("name", ()), *data.get("table", ())):
            if not one["reason"].strip():
                raise ValueError(f"{one.get('name', one.get('folder'))}: an exception needs a reason")
        return cls(
            {one["name"]: frozenset(one["modules"]) for one in data.get("name", ())},
            tuple(data.get("siblings", ())),
            data.get("commands", ""),
            frozenset(data.get("speech", ())),
            frozenset(one["folder"] for one in data.get("table", ())),
            frozenset(data.get("uncounted", ())),
        )


def names_twice(modules: Sequence[Module], allowed: Exceptions) -> dict[str, list[str]]:
    """Public top-level classes, functions and type aliases of one name in several modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in sorted(_public_names(module)):
            if not _is_command(module, name, allowed):
                homes[name].append(module.name)
    return {
        name: where
        for name, where in sorted(homes.items())
        if len(_apart(where, allowed)) > 1 and not set(where) <= allowed.names.get(name, frozenset())
    }


def _public_names(module: Module) -> set[str]:
    found = set()
    for node in module.tree.body:
        if isinstance(node, Definition):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for one in targets if isinstance(one, ast.Name) and _is_alias(one.id)}
    return {name for name in found if not name.startswith("_")}


def _is_alias(name: str) -> bool:
    """Spelled as a class is. Constants and type variables of one letter may repeat: each is its file's own."""
    return len(name) > 1 and name[0].isupper() and not name.isupper() and "_" not in name


def _is_command(module: Module, name: str, allowed: Exceptions) -> bool:
    """Whether the name is one a person types: a decorated command, or the function its file is named after."""
    if not allowed.commands or not module.name.startswith(f"{allowed.commands}."):
        return False
    return name == module.path.stem or name in _decorated_commands(module)


def _decorated_commands(module: Module) -> set[str]:
    return {
        node.name
        for node in module.tree.body
        if isinstance(node, FUNCTIONS)
        and any(ast.unparse(one).split("(")[0].endswith(".command") for one in node.decorator_list)
    }


def _apart(where: Sequence[str], allowed: Exceptions) -> set[str]:
    """The modules with siblings folded together: `a.x.load` and `a.y.load` are one where `a` has siblings."""
    return {_folded(name, allowed) for name in where}


def _folded(name: str, allowed: Exceptions) -> str:
    for parent in allowed.siblings:
        rest = name.removeprefix(f"{parent}.").split(".")
        if name.startswith(f"{parent}.") and len(rest) > 1:
            return ".".join([parent, "*", *rest[1:]])
    return name


# -- words -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OldWord:
    """A name that was given up: as a whole identifier, as a part of identifiers, in sentences, or as a file's name."""

    identifier: str = ""
    part: str = ""
    text: str = ""
    file: str = ""
    within: tuple[str, ...] = ()
    """Packages or modules where it is looked for; none: everywhere."""
    outside: tuple[str, ...] = ()
    """Where it may stay, because it means something else there."""

    def concerns(self, module: str) -> bool:
        """Whether the word is looked for in this module."""
        is_within = not self.within or _is_in(module, self.within)
        return is_within and not _is_in(module, self.outside)


def _is_in(module: str, places: Iterable[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def read_old_words(path: Path) -> list[OldWord]:
    """The table `old_word` of the committed list."""
    listed: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("old_word", [])
    return [OldWord(**{key: _frozen(value) for key, value in one.items()}) for one in listed]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def old_words(modules: Sequence[Module], words: Sequence[OldWord]) -> list[str]:
    """Where old words stand in identifiers, file names, and sentences for people. Comments and docstrings may."""
    found = []
    for module in modules:
        ours = [word for word in words if word.concerns(module.name)]
        found += [f"{module.name}: file {word.file}" for word in ours if word.file == module.path.name]
        lines: dict[str, list[int]] = defaultdict(list)
        for line, name in identifiers(module.tree):
            lines[name].append(line)
        for name, where in lines.items():
            if any(_names(word, name) for word in ours):
                found += [f"{module.name}:{line}: {name}" for line in where]
        for line, text in sentences(module.tree):
            found += [f"{module.name}:{line}: {word.text!r}" for word in ours if _says(word, text)]
    return found


def _names(word: OldWord, name: str) -> bool:
    if word.identifier:
        return name == word.identifier
    return bool(word.part) and f"_{word.part}_" in f"_{_snake(name)}_"


@cache
def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def _says(word: OldWord, text: str) -> bool:
    if not word.text or word.text.lower() not in text.lower():
        return False
    return bool(re.search(rf"(?<!\w){re.escape(word.text)}(?!\w)", text, re.IGNORECASE))


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that is defined, used or imported, with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield line, name
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield from ((line, part) for part in name.split("."))
                if other is not None:
                    yield line, other
            case ast.ImportFrom(module=str(name)):
                yield from ((line, part) for part in name.split("."))


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every text that is no docstring: errors, log lines and help are among them, wherever they were put together.

    The docstring of a command is its help, but it is read as every docstring is.
    """
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


# -- plain English -----------------------------------------------------------------------------------------------------

PRONOUNS = re.compile(r"\b(?:nobody|somebody|anybody|everybody|whoever|whomever)\b", re.IGNORECASE)
SPEECH = frozenset({"tell", "told", "hear", "heard", "say", "said", "ask", "asked", "given"})
"""What machines do not do, and participles that stand for a thing: no identifier has one of these as a word."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\\\.|[^\"\\\\])*\"", re.DOTALL)
"""Comments and texts of C++."""


def pronouns_per_1000_lines(texts: Iterable[str]) -> float:
    """How often an actor has no name."""
    num_found = num_lines = 0
    for text in texts:
        num_found += len(PRONOUNS.findall(text))
        num_lines += text.count("\n")
    return 1000 * num_found / max(1, num_lines)


def speech_words(name: str, text: str, allowed: Collection[str] = ()) -> list[str]:
    """Identifiers of a Python or C++ file that have a word of speech, each with its line."""
    if name.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]
    else:
        code = NOT_CODE.sub(lambda part: re.sub(r"[^\n]", " ", part[0]), text)
        found = [(code.count("\n", 0, one.start()) + 1, one[0]) for one in IDENTIFIER.finditer(code)]
    return [
        f"{name}:{line}: {identifier}"
        for line, identifier in found
        if identifier not in allowed and SPEECH & {word.lower() for word in WORD.findall(identifier)}
    ]


# -- lengths -----------------------------------------------------------------------------------------------------------


def longest_file(modules: Sequence[Module]) -> tuple[int, str]:
    """Lines of the longest file, and which it is."""
    return max(((len(module.text.splitlines()), module.name) for module in modules), default=(0, ""))


def files_of_folders(paths: Iterable[str]) -> dict[str, int]:
    """How many code files each folder has of its own. A package's `__init__.py` is not counted."""
    counts: dict[str, int] = defaultdict(int)
    for path in map(PurePosixPath, paths):
        if path.suffix in CODE and path.name != "__init__.py":
            counts[str(path.parent)] += 1
    return dict(counts)


def longest_function(modules: Sequence[Module]) -> tuple[int, str]:
    """Lines of the longest function, from its first word to its last, and which it is."""
    sizes = (
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.name}.{node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, FUNCTIONS)
    )
    return max(sizes, default=(0, ""))


FENCE = re.compile(r"\s*(`{3,}|~{3,})")
MARKER = re.compile(r"\s*(?:(?:[-*+>]|\d+[.)])\s+)*")
NO_PROSE = re.compile(r"\s*(?:#|\||<)|\[[^\]]+\]:\s")
"""Headings, rows of tables, HTML, and targets of links."""


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of Markdown that a writer can wrap."""
    fence = ""
    for at, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
        elif not fence and not NO_PROSE.match(line):
            yield at, line


def longest_prose_line(pages: Iterable[Path], bound: int) -> tuple[int, str]:
    """The longest line of prose, and where. A line that has no space before the bound cannot be cut and is passed over:
    a link."""
    longest, where = 0, ""
    for page in pages:
        for at, line in prose_lines(page.read_text(encoding="utf-8")):
            marker = MARKER.match(line)
            content = line[len(marker[0]) :] if marker else line
            is_uncuttable = len(line) > bound and " " not in content[: bound + 1 - (len(line) - len(content))]
            if len(line) > longest and not is_uncuttable:
                longest, where = len(line), f"{page}:{at}"
    return longest, where


# -- documents ---------------------------------------------------------------------------------------------------------


def unmentioned(names: Iterable[str], pages: Iterable[Path]) -> list[str]:
    """Names that no page has as a word of its own."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def routes(modules: Sequence[Module], calls: Sequence[str] = ("add_route", "Route")) -> list[str]:
    """Paths that are given to a call that adds a route, braces as they are written."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in calls:
                texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                found += [text for text in texts if text.startswith("/")]
    return sorted(set(found))
