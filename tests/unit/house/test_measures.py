"""What the proof of the house counts, on small invented trees."""

from pathlib import Path

import pytest

from proofs.house import measures
from proofs.house.measures import Exceptions, OldWord


def tree(folder: Path, **files: str) -> list[measures.Module]:
    """A package `shop`; `desk__bell="..."` is the file shop/desk/bell.py, `desk__INIT` its `__init__.py`."""
    for name, text in files.items():
        path = (folder / "shop").joinpath(*name.split("__"))
        path = path.with_name(path.name.replace("INIT", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return measures.read_tree(folder / "shop")


class TestImports:
    def test_imports_are_found_at_the_top_in_functions_and_with_dots(self, tmp_path: Path) -> None:
        modules = tree(
            tmp_path,
            desk__bell="from shop.base import cash\n",
            desk__till="import shop.mail.box\nimport os\n",
            mail__box="def open():\n    from shop.base.cash import Coin\n",
            mail__slot="from . import box\nfrom .box import open\n",
            base__cash="Coin = int\n",
        )
        assert measures.import_graph(modules) == {
            "shop.base.cash": set(),
            "shop.desk.bell": {"shop.base.cash"},
            "shop.desk.till": {"shop.mail.box"},
            "shop.mail.box": {"shop.base.cash"},
            "shop.mail.slot": {"shop.mail.box"},
        }

    def test_packages_that_import_each_other_are_one_circle(self) -> None:
        graph = {"shop.a.x": {"shop.b.x"}, "shop.b.x": {"shop.c.x"}, "shop.b.y": {"shop.d.x"}, "shop.c.x": {"shop.a.y"}}
        assert measures.circles(measures.package_graph(graph)) == [["shop.a", "shop.b", "shop.c"]]
        assert measures.circles(graph) == []

    def test_folders_that_stand_beside_each_other_and_import_each_other_are_one_circle(self) -> None:
        packages = {"shop", "shop.a", "shop.a.left", "shop.a.right", "shop.b"}
        graph = {
            "shop.a.left.x": {"shop.a.right.x", "shop.b.x"},
            "shop.a.right.y": {"shop.a.left.y"},
            "shop.a.top": {"shop.a.left.x"},
            "shop.a.left.z": {"shop.a.top"},
        }
        rooms = measures.room_graph(graph, packages)
        assert rooms == {"shop.a.left": {"shop.a.right"}, "shop.a.right": {"shop.a.left"}, "shop.a": {"shop.b"}}
        assert measures.circles(rooms) == [["shop.a.left", "shop.a.right"]]

    def test_a_folder_has_the_code_files_that_stand_in_it_and_no_others(self) -> None:
        paths = ["src/a/__init__.py", "src/a/x.py", "src/a/y.cpp", "src/a/notes.md", "src/a/b/z.js"]
        assert measures.files_of_folders(paths) == {"src/a": 2, "src/a/b": 1}


class TestNames:
    def test_a_public_class_function_or_alias_in_two_modules_is_told(self, tmp_path: Path) -> None:
        modules = tree(
            tmp_path,
            a__x="class Till: ...\ndef ring(): ...\nCoin = int\nMAX = 1\nT = 2\ndef _own(): ...\n",
            b__y="class Till: ...\nasync def ring(): ...\nclass Coin: ...\nMAX = 2\nT = 3\ndef _own(): ...\n",
        )
        assert list(measures.names_twice(modules, Exceptions())) == ["Coin", "Till", "ring"]

    def test_siblings_commands_and_listed_names_may_repeat(self, tmp_path: Path) -> None:
        modules = tree(
            tmp_path,
            banks__red__load="def load(): ...\n",
            banks__blue__load="def load(): ...\n",
            cli__ring="def ring(): ...\n",
            cli__keys="import typer\nkeys_app = typer.Typer()\n@keys_app.command()\ndef add(): ...\n",
            base__ring="def ring(): ...\ndef add(): ...\ndef main(): ...\n",
            desk__bell="def main(): ...\n",
        )
        listed = {"main": frozenset({"shop.base.ring", "shop.desk.bell"})}
        allowed = Exceptions(listed, siblings=("shop.banks",), commands="shop.cli")
        assert measures.names_twice(modules, allowed) == {}
        assert list(measures.names_twice(modules, Exceptions())) == ["add", "load", "main", "ring"]

    def test_a_third_place_for_a_listed_name_is_told(self, tmp_path: Path) -> None:
        modules = tree(tmp_path, a__x="def main(): ...", b__x="def main(): ...", c__x="def main(): ...")
        allowed = Exceptions({"main": frozenset({"shop.a.x", "shop.b.x"})})
        assert list(measures.names_twice(modules, allowed)) == ["main"]

    def test_an_exception_without_a_reason_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "list.toml"
        file.write_text('[[name]]\nname = "main"\nmodules = ["a"]\nreason = " "\n')
        with pytest.raises(ValueError, match="needs a reason"):
            Exceptions.read(file)


class TestWords:
    def test_a_word_is_found_as_a_name_as_a_part_of_one_and_in_a_sentence(self, tmp_path: Path) -> None:
        modules = tree(
            tmp_path,
            a__x="class Doors: ...\nmax_doors = 1\nindoors = 2\nraise ValueError(f'{max_doors} doors are shut')\n",
        )
        found = measures.old_words(modules, [OldWord(part="doors"), OldWord(text="doors")])
        assert found == [
            "shop.a.x:1: Doors",
            "shop.a.x:2: max_doors",
            "shop.a.x:4: max_doors",
            "shop.a.x:4: 'doors'",
        ]

    def test_comments_docstrings_and_other_names_do_not_count(self, tmp_path: Path) -> None:
        text = '"""Doors."""\n# doors\nplaces = 1\n"""The doors."""\ndef f():\n    """Doors."""\n'
        words = [OldWord(part="doors"), OldWord(text="doors"), OldWord(identifier="place")]
        assert measures.old_words(tree(tmp_path, a__x=text), words) == []

    def test_imports_keywords_and_file_names_count(self, tmp_path: Path) -> None:
        modules = tree(tmp_path, a__shape="from shop.doors import x\ny = dict(doors=x)\n")
        found = measures.old_words(modules, [OldWord(part="doors"), OldWord(file="shape.py")])
        assert found == ["shop.a.shape: file shape.py", "shop.a.shape:1: doors", "shop.a.shape:2: doors"]

    def test_a_word_may_be_looked_for_in_some_places_only(self, tmp_path: Path) -> None:
        modules = tree(tmp_path, a__x="land = 1", b__x="land = 1", c__x="land = 1")
        assert measures.old_words(modules, [OldWord("land", within=("shop.a",))]) == ["shop.a.x:1: land"]
        kept = OldWord("land", outside=("shop.a", "shop.b"))
        assert measures.old_words(modules, [kept]) == ["shop.c.x:1: land"]


class TestLengths:
    def test_the_longest_file_and_function_are_named(self, tmp_path: Path) -> None:
        modules = tree(
            tmp_path,
            a__x="x = 1\n" * 9,
            a__y="class C:\n    def f(self):\n        return (\n            1\n        )\n",
        )
        assert measures.longest_file(modules) == (9, "shop.a.x")
        assert measures.longest_function(modules) == (4, "shop.a.y.f")

    def test_only_lines_that_can_be_wrapped_are_prose(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        wide = "word " * 30
        page.write_text(
            f"# {wide}\n| {wide} |\n```\n{wide}\n```\n<!-- {wide} -->\n[link]: {wide}\n"
            f"- [text](https://example.com/{'x' * 120})\na short line\n"
        )
        assert measures.longest_prose_line([page], 100) == (len("a short line"), f"{page}:9")
        page.write_text(f"a short line\n\n- {wide}\n")
        assert measures.longest_prose_line([page], 100) == (len(f"- {wide}"), f"{page}:3")

    def test_a_long_link_at_the_end_of_a_line_is_on_the_wrong_line(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(f"see [text](https://example.com/{'x' * 120})\n")
        assert measures.longest_prose_line([page], 100)[0] > 100


class TestDocuments:
    def test_a_name_is_mentioned_as_a_word_of_its_own(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("`max_running` and `/v1/models/{name}`; quire serve-more")
        names = ["max_running", "running", "/v1/models/{name}", "quire serve"]
        assert measures.unmentioned(names, [page]) == ["running", "quire serve"]

    def test_routes_are_the_paths_given_to_what_adds_them(self, tmp_path: Path) -> None:
        text = 'add_route(app, "GET", "/ready", f)\nRoute("/drain", g)\nother("/none")\n'
        assert measures.routes(tree(tmp_path, a__x=text)) == ["/drain", "/ready"]


class TestPlainEnglish:
    def test_an_actor_without_a_name_is_counted(self) -> None:
        assert measures.pronouns_per_1000_lines(["Nobody waits.\n", "x = 1\n"]) == 500.0

    def test_identifiers_with_a_word_of_speech_are_found_and_libraries_own_are_not(self) -> None:
        text = "told = 1\nretold = 2\nnum_heard = file.tell()\nclass AskedBytes: ...\n'told'  # told\n"
        assert measures.speech_words("a.py", text, {"tell"}) == [
            "a.py:1: told",
            "a.py:3: num_heard",
            "a.py:4: AskedBytes",
        ]

    def test_of_c_plus_plus_comments_and_texts_are_left_out(self) -> None:
        text = '// told\nint told = 1; /* asked\n */ puts("said"); ask();\n'
        assert measures.speech_words("a.cpp", text) == ["a.cpp:2: told", "a.cpp:3: ask"]
