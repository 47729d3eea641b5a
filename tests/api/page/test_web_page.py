"""The pages at `/` and `/dashboard`: served to all, holding nothing of anybody, loading nothing from elsewhere."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.api.web_page import CSP, PAGES, WebPage
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

API = Path(str(files("quire.api")))
FILES = [(page, name) for page in PAGES for name in page.names]
MOST_LINES = 400


def served(page: WebPage) -> set[str]:
    """All paths of a page."""
    return {page.path_of(name) for name in page.names}


def test_they_are_served_without_a_key_and_tell_a_browser_what_it_may_load(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "alice")
    with house(models={"oracle": talker()}, keys_file=path) as here:
        for page, name in FILES:
            reply = here.get(page.path_of(name))
            assert (reply.status, reply.data) == (200, (API / page.folder / name).read_bytes())
            assert reply.headers["content-security-policy"] == CSP
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert here.get("/v1/models").status == 401


def test_no_page_is_served_where_they_were_switched_off() -> None:
    with house(models={"oracle": talker()}, settings=AdmissionSettings(has_page=False)) as here:
        assert {here.get(page.path_of(name)).status for page, name in FILES} == {404}


def test_a_page_of_another_name_is_refused_as_the_api_is(here: LiveServer) -> None:
    assert {here.request("GET", page.path, None, host="evil.example").status for page in PAGES} == {403}


def test_no_two_files_are_served_at_one_path() -> None:
    assert len({page.path_of(name) for page, name in FILES}) == len(FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.folder)
def test_every_file_of_the_folder_is_served(page: WebPage) -> None:
    assert {one.name for one in (API / page.folder).iterdir()} == set(page.names)


@pytest.mark.parametrize(("page", "name"), FILES, ids=[f"{page.folder}/{name}" for page, name in FILES])
def test_a_file_refers_to_files_of_its_page_alone(page: WebPage, name: str) -> None:
    text = page.read(name).decode().replace("http://www.w3.org/2000/svg", "")
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.search(r"https?://[a-z]", text)
    assert not re.search(r"url\(|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    referred = re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text) if name.endswith(".html") else []
    imported = [f"/{page.folder}/{other}" for other in re.findall(r"from \"\./([^\"]*)\"", text)]
    assert {*referred, *imported} <= served(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.folder)
def test_a_page_has_no_script_or_style_in_its_markup(page: WebPage) -> None:
    markup = page.read("index.html").decode()
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", markup)
