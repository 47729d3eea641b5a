"""Checks the rules of the source tree: imports without cycles, one name per thing, lengths, documentation of all public
names.

    make proof-house
"""

import ast
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import quire
from benchmarks.record import PROOF_RESULTS, ROOT, say
from benchmarks.tables import results
from proofs.framework.builds import older_sections
from proofs.framework.proof import Proof, run, section
from proofs.house import coupling, docstrings, measures, way_in
from proofs.house.worker_probe import REPORT
from quire.config import SETTINGS, ModelSettings
from quire.core.events import Finished, RequestEvent
from quire.core.request import Request, ResolvedSampling
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.worker.messages import Open
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import WorkerPlan
from tests.support.commands import leaf_commands
from tests.support.pages import broken, documents, this_repository

EXCEPTIONS = ROOT / "proofs" / "house_exceptions.toml"
TEXT_MODULES = ("quire.text", "quire.api", "quire.client", "jinja2", "tokenizers", "starlette", "uvicorn")
MAX_PRONOUNS = 0.3
MAX_FOLDER_FILES, MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PROSE_CHARACTERS = 15, 600, 45, 100
MAX_SOURCE_LINES, MAX_PROOF_LINES = 61_000, 22_500
RECORDS = ("memory", "scheduler", "worker", "torch", "native", "doors")
"""Proofs whose records must be of the current build."""
COUPLING = (
    ("prose_matches", coupling.prose_matches, 40),
    ("private_uses", coupling.private_uses, 116),
    ("dotted_patches", coupling.dotted_patches, 115),
)


@section("imports")
def prove_imports(proof: Proof) -> None:
    modules = tree()
    graph = measures.import_graph(modules)
    rooms = measures.room_graph(graph, {module.name for module in modules if module.is_package})
    graphs = (measures.package_graph(graph), rooms, graph)
    proof.none("circles", [circle for each in graphs for circle in measures.circles(each)])
    arguments = ("from importlinter.cli import lint_imports_command as run; run()", "--config", "pyproject.toml")
    process = subprocess.run([sys.executable, "-c", *arguments], cwd=ROOT, capture_output=True, text=True)
    broken = re.findall(r"^(.*) BROKEN", process.stdout, re.MULTILINE)
    if process.returncode and not broken:
        raise RuntimeError(f"import-linter ended with code {process.returncode}: {process.stderr[-500:]}")
    proof.none("upward_imports", broken, "broken contracts of import-linter")


@section("names")
def prove_names(proof: Proof) -> None:
    modules = tree()
    allowed = measures.Exceptions.read(EXCEPTIONS)
    proof.none("names_twice", measures.names_twice(modules, allowed).items())
    proof.none("old_words", measures.old_words(modules, measures.read_old_words(EXCEPTIONS)))


@section("lengths")
def prove_lengths(proof: Proof) -> None:
    modules = tree()
    at_most(proof, "longest_file", *measures.longest_file(modules), MAX_FILE_LINES)
    at_most(proof, "longest_function", *measures.longest_function(modules), MAX_FUNCTION_LINES)


@section("plain English")
def prove_words(proof: Proof) -> None:
    allowed = measures.Exceptions.read(EXCEPTIONS).speech
    paths = [path for folder in ("src", "native") for path in git_files(folder)]
    texts = {path: (ROOT / path).read_text() for path in paths if path.endswith((".py", ".cpp", ".hpp"))}
    proof.at_most("pronouns", measures.pronouns_per_1000_lines(texts.values()), MAX_PRONOUNS, "in 1,000 lines")
    proof.none(
        "speech_words",
        [word for path, text in texts.items() for word in measures.speech_words(path, text, allowed)],
    )
    proof.at_most("speech_exceptions", len(allowed), 10)


@section("rooms")
def prove_rooms(proof: Proof) -> None:
    allowed = measures.Exceptions.read(EXCEPTIONS)
    paths = [path for folder in ("src", "native", "tests", "proofs") for path in git_files(folder)]
    counts = measures.files_of_folders(paths)
    for folder, count in counts.items():
        if count > MAX_FOLDER_FILES and folder not in allowed.tables:
            say(f"    {folder}: {count} files")
    proof.at_most(
        "folder_files", max(count for folder, count in counts.items() if folder not in allowed.tables), MAX_FOLDER_FILES
    )
    proof.report("folder_tables", len(allowed.tables), "folders that are lists of similar files")


@section("documents")
def prove_documents(proof: Proof) -> None:
    modules = tree()
    pages = [ROOT / name for name in git_files("*.md")]
    at_most(proof, "prose_line", *measures.longest_prose_line(pages, MAX_PROSE_CHARACTERS), MAX_PROSE_CHARACTERS)
    reference = [page for page in pages if page.is_relative_to(ROOT / "docs" / "reference")]
    guides = [page for page in pages if page.is_relative_to(ROOT / "docs" / "guides")]
    paths = [path.replace("{name:path}", "{name}") for path in measures.routes(modules)]
    names = [*quire.__all__, *(setting.name for setting in SETTINGS), *paths, *commands()]
    missing = [*measures.unmentioned(names, [*reference, *guides]), *docstrings.undocumented(modules)]
    proof.none("public_docs", missing)
    proof.none("broken_pages", broken(this_repository(), documents()))


@section("worker")
def prove_worker(proof: Proof) -> None:
    loaded = asyncio.run(modules_of_a_worker())
    wrong = [name for name in loaded if any(name == text or name.startswith(f"{text}.") for text in TEXT_MODULES)]
    if "quire.backends.cpu.runner" not in loaded:
        raise RuntimeError("expected the worker to run its model on the CPU backend")
    proof.none("worker_text_imports", wrong)


@section("records")
def prove_records(proof: Proof) -> None:
    records = {name.removeprefix("proof-"): record for name, record in results(PROOF_RESULTS).items()}
    older = {name: older_sections(records[name]) for name in RECORDS}
    for name, titles in older.items():
        say(f"    {name}, sections of an older build: {', '.join(titles) or 'none'}")
    proof.equals("records_old", sum(map(bool, older.values())), 0, f"of {', '.join(RECORDS)}")
    uncounted = measures.Exceptions.read(EXCEPTIONS).uncounted
    seconds = [s for record in records.values() for title, s in record["seconds"].items() if title not in uncounted]
    proof.report("proof_hours", sum(seconds) / 3600, "sum of the latest times of all sections")


@section("sizes")
def prove_sizes(proof: Proof) -> None:
    findings = {*git_files("proofs/findings/*.py")}
    proof.at_most("src_lines", num_lines(git_files("src/*.py")), MAX_SOURCE_LINES)
    proof.at_most("proof_lines", num_lines({*git_files("proofs/*.py")} - findings), MAX_PROOF_LINES, "without findings")


@section("coupling")
def prove_coupling(proof: Proof) -> None:
    trees = {path: ast.parse((ROOT / path).read_text()) for path in git_files("tests/*.py")}
    for key, places_in, bound in COUPLING:
        places = [f"{path}:{line}: {text}" for path, tree in trees.items() for line, text in places_in(tree)]
        for place in places:
            say(f"    {key}: {place}")
        proof.at_most(key, len(places), bound)


def num_lines(paths: Iterable[str]) -> int:
    return sum((ROOT / path).read_text().count("\n") for path in paths)


def tree() -> list[measures.Module]:
    """Read and parse all modules of the source."""
    return measures.read_tree(ROOT / "src" / "quire")


async def modules_of_a_worker() -> list[str]:
    """Return the modules that a worker has loaded after one request to a small model on the CPU backend."""
    from tests.support.models import architectures  # noqa: PLC0415 - imports transformers, which takes seconds

    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_events(events: Sequence[RequestEvent]) -> None:
        if any(isinstance(event, Finished) for event in events) and not finished.done():
            finished.set_result(None)

    def on_failure(error: BaseException) -> None:
        finished.set_exception(error)

    with TemporaryDirectory() as folder:
        report = Path(folder) / "modules"
        settings = ModelSettings(memory_bytes=4 << 30, block_size=32, max_sequence_tokens=256, num_threads=1)
        plan = WorkerPlan(
            Open(str(architectures.directory("llama-native")), settings, QueueConfig(), bytes(32), None),
            command=(sys.executable, "-m", "proofs.house.worker_probe"),
            environment={REPORT: str(report), "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        )
        supervisor = Supervisor(plan, on_events, on_failure)
        ready = await supervisor.start()
        try:
            params, namespace = ResolvedSampling(max_tokens=4), ready.info.namespace("house")
            supervisor.submit(Request("a", (5, 6, 7), namespace, 0.0, params))
            await finished
        finally:
            await supervisor.close()
        return report.read_text().splitlines()


def commands() -> list[str]:
    """Return every command as a user types it."""
    return [" ".join(("quire", *words)) for words in leaf_commands()]


def git_files(pattern: str) -> list[str]:
    """Return files of the repository, including untracked ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def at_most(proof: Proof, key: str, value: float, where: str, bound: float) -> None:
    """Add a row with an upper bound, and print where the value comes from."""
    say(f"    {where}")
    proof.at_most(key, value, bound)


PATHS = ("src", "native", "docs")

if __name__ == "__main__":
    sys.exit(run("house", sys.modules[__name__], way_in, paths=PATHS))
