"""Measures a source tree by parsing it: imports, names, words, lengths, lines of prose.

Nothing is imported from the measured tree. Exceptions are listed in a committed file, each with its reason.
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
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, path, text, ast.parse(text)))
    return modules


# -- imports -----------------------------------------------------------------------------------------------------------


def import_graph(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return the modules that each one imports, at its top, inside functions or only for the type checker."""
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
    """Return the module after `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*base, node.module] if node.module else base)


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """Return the imports between packages one level below the root. The root's own files are not included."""
    packages: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        home = _package(module)
        if home:
            packages[home] |= {_package(other) for other in imported} - {home, ""}
    return dict(packages)


def _package(module: str) -> str:
    return ".".join(module.split(".")[:2]) if "." in module else ""


def room_graph(graph: Graph, packages: Collection[str]) -> dict[str, set[str]]:
    """Return the imports between sibling folders ("rooms"), at every depth.

    An import of `a.b.c.d` in `a.x.y` is one from `a.x` to `a.b`, if both are folders. Imports of a file directly in `a`
    are not imports between folders.
    """
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        for other in imported:
            source_parts, target_parts = module.split("."), other.split(".")
            pairs = enumerate(zip(source_parts, target_parts, strict=False))
            depth = next((index for index, pair in pairs if pair[0] != pair[1]), 0)
            source, target = ".".join(source_parts[: depth + 1]), ".".join(target_parts[: depth + 1])
            if depth and source in packages and target in packages:
                rooms[source].add(target)
    return dict(rooms)


def circles(graph: Graph) -> list[list[str]]:
    """Return groups of two or more nodes in import cycles (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

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
            start = stack.index(node)
            group = sorted(stack[start:])
            del stack[start:]
            if len(group) > 1:
                cycles.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return cycles


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exceptions:
    """The committed list of allowed violations, each with its reason."""

    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """A name, and the modules that may share it."""
    siblings: tuple[str, ...] = ()
    """Packages whose subpackages are alternatives: files with the same path below them may share names."""
    commands: str = ""
    """The package of commands, where a command and its file have the name that a user types."""
    speech: frozenset[str] = frozenset()
    """Identifiers with words of speech that are libraries' own."""
    tables: frozenset[str] = frozenset()
    """Folders that are lists of similar files, and may have more of them."""
    uncounted: frozenset[str] = frozenset()
    """Sections of proofs whose time is not counted."""

    @classmethod
    def read(cls, path: Path) -> "Exceptions":
        """Read the committed list. Raises ValueError for an exception without a reason."""
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
    """Return public top-level classes, functions and type aliases whose name occurs in several modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in sorted(_public_names(module)):
            if not _is_command(module, name, allowed):
                homes[name].append(module.name)
    return {
        name: places
        for name, places in sorted(homes.items())
        if len(_without_siblings(places, allowed)) > 1 and not set(places) <= allowed.names.get(name, frozenset())
    }


def _public_names(module: Module) -> set[str]:
    names = set()
    for node in module.tree.body:
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for one in targets if isinstance(one, ast.Name) and _is_alias(one.id)}
    return {name for name in names if not name.startswith("_")}


def _is_alias(name: str) -> bool:
    """Whether the name is CamelCase. Constants and type variables of one letter may repeat."""
    return len(name) > 1 and name[0].isupper() and not name.isupper() and "_" not in name


def _is_command(module: Module, name: str, allowed: Exceptions) -> bool:
    """Whether a user types the name: a decorated command, or the function that its file is named after."""
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


def _without_siblings(where: Sequence[str], allowed: Exceptions) -> set[str]:
    """Replace siblings by `*`: `a.x.load` and `a.y.load` are one module if the subpackages of `a` are siblings."""
    return {_fold(name, allowed) for name in where}


def _fold(name: str, allowed: Exceptions) -> str:
    for parent in allowed.siblings:
        rest = name.removeprefix(f"{parent}.").split(".")
        if name.startswith(f"{parent}.") and len(rest) > 1:
            return ".".join([parent, "*", *rest[1:]])
    return name


# -- words -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OldWord:
    """A word that is no longer used: as an identifier, as a part of one, in sentences, or as the name of a file."""

    identifier: str = ""
    part: str = ""
    text: str = ""
    file: str = ""
    within: tuple[str, ...] = ()
    """Packages or modules to search; empty: all."""
    outside: tuple[str, ...] = ()
    """Packages or modules where it is allowed, because it means something else there."""

    def concerns(self, module: str) -> bool:
        """Whether the word is forbidden in this module."""
        is_within = not self.within or _is_in(module, self.within)
        return is_within and not _is_in(module, self.outside)


def _is_in(module: str, places: Iterable[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def read_old_words(path: Path) -> list[OldWord]:
    """Read the table `old_word` of the committed list."""
    listed: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("old_word", [])
    return [OldWord(**{key: _freeze(value) for key, value in one.items()}) for one in listed]


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def old_words(modules: Sequence[Module], words: Sequence[OldWord]) -> list[str]:
    """Find old words in identifiers, file names and strings. Comments and docstrings are not searched."""
    violations = []
    for module in modules:
        concerned = [word for word in words if word.concerns(module.name)]
        violations += [f"{module.name}: file {word.file}" for word in concerned if word.file == module.path.name]
        lines: dict[str, list[int]] = defaultdict(list)
        for line, name in identifiers(module.tree):
            lines[name].append(line)
        for name, numbers in lines.items():
            if any(_occurs_in_name(word, name) for word in concerned):
                violations += [f"{module.name}:{line}: {name}" for line in numbers]
        for line, text in sentences(module.tree):
            violations += [f"{module.name}:{line}: {word.text!r}" for word in concerned if _occurs_in(word, text)]
    return violations


def _occurs_in_name(word: OldWord, name: str) -> bool:
    if word.identifier:
        return name == word.identifier
    return bool(word.part) and f"_{word.part}_" in f"_{_snake(name)}_"


@cache
def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def _occurs_in(word: OldWord, text: str) -> bool:
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
    """Yield every string that is not a docstring, with its line: errors, log messages and help are among them.

    The docstring of a command is its help, but it is skipped like every docstring.
    """
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


# -- plain English -----------------------------------------------------------------------------------------------------

PRONOUNS = re.compile(r"\b(?:nobody|somebody|anybody|everybody|whoever|whomever)\b", re.IGNORECASE)
SPEECH = frozenset({"tell", "told", "hear", "heard", "say", "said", "ask", "asked", "given"})
"""Words of speech, and participles used as nouns: no identifier may contain one of them as a word."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\\\.|[^\"\\\\])*\"", re.DOTALL)
"""Comments and strings of C++."""


def pronouns_per_1000_lines(texts: Iterable[str]) -> float:
    """Return how many indefinite pronouns there are in 1,000 lines."""
    num_pronouns = num_lines = 0
    for text in texts:
        num_pronouns += len(PRONOUNS.findall(text))
        num_lines += text.count("\n")
    return 1000 * num_pronouns / max(1, num_lines)


def speech_words(name: str, text: str, allowed: Collection[str] = ()) -> list[str]:
    """Find identifiers with a word of speech in a Python or C++ file."""
    if name.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names = [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]
    else:
        code = NOT_CODE.sub(lambda part: re.sub(r"[^\n]", " ", part[0]), text)
        names = [(code.count("\n", 0, one.start()) + 1, one[0]) for one in IDENTIFIER.finditer(code)]
    return [
        f"{name}:{line}: {identifier}"
        for line, identifier in names
        if identifier not in allowed and SPEECH & {word.lower() for word in WORD.findall(identifier)}
    ]


# -- lengths -----------------------------------------------------------------------------------------------------------


def longest_file(modules: Sequence[Module]) -> tuple[int, str]:
    """Return the number of lines of the longest file, and its name."""
    return max(((len(module.text.splitlines()), module.name) for module in modules), default=(0, ""))


def files_of_folders(paths: Iterable[str]) -> dict[str, int]:
    """Count code files directly in each folder, without `__init__.py`."""
    counts: dict[str, int] = defaultdict(int)
    for path in map(PurePosixPath, paths):
        if path.suffix in CODE and path.name != "__init__.py":
            counts[str(path.parent)] += 1
    return dict(counts)


def longest_function(modules: Sequence[Module]) -> tuple[int, str]:
    """Return the number of lines of the longest function, and its name."""
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
    """Yield the lines of Markdown that can be wrapped, with their numbers."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and (not fence or (line.strip() == mark[1] and mark[1].startswith(fence))):
            fence = "" if fence else mark[1]
        elif not fence and not NO_PROSE.match(line):
            yield number, line


def longest_prose_line(pages: Iterable[Path], bound: int) -> tuple[int, str]:
    """Return the length of the longest line of prose, and its place. Lines that cannot be wrapped, because they have no
    space before the bound, are skipped."""
    longest, where = 0, ""
    for page in pages:
        for number, line in prose_lines(page.read_text(encoding="utf-8")):
            marker = MARKER.match(line)
            content = line[len(marker[0]) :] if marker else line
            is_uncuttable = len(line) > bound and " " not in content[: bound + 1 - (len(line) - len(content))]
            if len(line) > longest and not is_uncuttable:
                longest, where = len(line), f"{page}:{number}"
    return longest, where


# -- documents ---------------------------------------------------------------------------------------------------------


def unmentioned(names: Iterable[str], pages: Iterable[Path]) -> list[str]:
    """Return names that do not occur as a word on any page."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def routes(modules: Sequence[Module], calls: Sequence[str] = ("add_route", "Route")) -> list[str]:
    """Return the paths in calls that add a route, with their braces."""
    paths = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in calls:
                texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                paths += [text for text in texts if text.startswith("/")]
    return sorted(set(paths))
