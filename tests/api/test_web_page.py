"""The page at `/`: served to everybody, holding nothing of anybody, and loading nothing from elsewhere."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.api.web_page import NAMES, POLICY, path_of
from tests.support.local_api import House, house
from tests.support.talkers import talker

FOLDER = Path(str(files("quire.api") / "page"))
SOURCES = {name: (FOLDER / name).read_text() for name in NAMES}


def test_it_is_served_without_a_key_and_tells_a_browser_what_it_may_load(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "alice")
    with house(models={"oracle": talker()}, keys_file=path) as here:
        for name in NAMES:
            reply = here.get(path_of(name))
            assert (reply.status, reply.data) == (200, SOURCES[name].encode())
            assert reply.headers["content-security-policy"] == POLICY
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert here.get("/v1/models").status == 401


def test_no_page_is_served_where_it_was_switched_off() -> None:
    with house(models={"oracle": talker()}, settings=AdmissionSettings(has_page=False)) as here:
        assert {here.get(path_of(name)).status for name in NAMES} == {404}


def test_a_page_of_another_name_is_refused_as_the_api_is(here: House) -> None:
    assert here.request("GET", "/", None, host="evil.example").status == 403


def test_every_file_of_the_folder_is_served() -> None:
    assert {one.name for one in FOLDER.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_refers_to_files_of_the_page_alone(name: str) -> None:
    text = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://[a-z]", text)
    assert not re.search(r"url\(|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    referred = re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text) if name.endswith(".html") else []
    imported = [f"/page/{other}" for other in re.findall(r"from \"\./([^\"]*)\"", text)]
    assert {*referred, *imported} <= {path_of(other) for other in NAMES}


def test_the_page_has_no_script_or_style_in_its_markup() -> None:
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", SOURCES["index.html"])
