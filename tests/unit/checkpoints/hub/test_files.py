"""Models come from a hub that stands in for the real one, over sockets and through the hub's own library."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from quire.checkpoints import cache, resolve
from quire.checkpoints.hub import download as hub_download
from quire.checkpoints.hub import files as hub_files
from quire.checkpoints.hub import listing as hub_listing
from quire.checkpoints.hub.download import INCOMPLETE
from quire.checkpoints.hub.files import HubName, find_local, ignore_judged, pull
from quire.checkpoints.hub.listing import is_safe_name
from quire.checkpoints.hub.variants import Verdict
from quire.checkpoints.progress import quiet
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.fleet.hub_stand_in import HubStandIn, Shelf, standing_in
from tests.support.models.tiny_models import Tiny, make_directory, write_gguf

MEMORY = 8 << 30
DATA = bytes(range(256)) * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_download, "_pause", lambda _seconds: None)
    with standing_in() as stand_in:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stand_in.url)
        stand_in.shelves["org/name"] = Shelf({"model-Q8_0.gguf": DATA, "model-Q4_0.gguf": DATA[:5000], "a.md": b"x"})
        yield stand_in


def fetch(name: str = "org/name", tell: list[Verdict] | None = None) -> Path:
    wanted = HubName.parse(name)
    assert wanted is not None
    return pull(wanted, MEMORY, quiet, (tell if tell is not None else []).extend)


def kept(tmp_path: Path) -> dict[str, bytes]:
    """Whatever can be opened by its name."""
    return {path.name: path.read_bytes() for path in tmp_path.glob("hub/*/snapshots/*/**/*") if path.is_file()}


def incomplete(tmp_path: Path) -> list[Path]:
    return [*tmp_path.glob(f"hub/*/blobs/*{INCOMPLETE}")]


def test_the_best_file_that_fits_is_fetched_and_told(hub: HubStandIn, tmp_path: Path) -> None:
    judged: list[Verdict] = []
    path = fetch(tell=judged)
    assert path.read_bytes() == DATA
    assert kept(tmp_path) == {"model-Q8_0.gguf": DATA}
    assert [(one.variant.label, one.is_selected) for one in judged] == [("Q4_0", False), ("Q8_0", True)]
    assert find_local(HubName("org/name"), MEMORY) == path


def test_a_quantisation_that_is_named_is_fetched(hub: HubStandIn, tmp_path: Path) -> None:
    assert fetch("org/name:q4_0").name == "model-Q4_0.gguf"
    assert find_local(HubName("org/name", "Q8_0"), MEMORY) is None
    assert find_local(HubName("org/name"), MEMORY) == find_local(HubName("org/name", "Q4_0"), MEMORY)


def test_what_is_here_is_opened_without_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny-F32.gguf", Tiny())
    hub.shelves["org/tiny"] = Shelf({"tiny-F32.gguf": source.read_bytes()})
    once = resolve("org/tiny", cache=tmp_path / "cache")
    hub.shelves.clear()
    num_requests = len(hub.requests)
    again = resolve("org/tiny", cache=tmp_path / "cache")
    assert again.fingerprint == once.fingerprint
    assert len(hub.requests) == num_requests


def test_a_folder_of_safetensors_is_fetched_whole(hub: HubStandIn, tmp_path: Path) -> None:
    source = make_directory(tmp_path / "source")
    hub.shelves["org/folder"] = Shelf({path.name: path.read_bytes() for path in source.iterdir()})
    made = resolve("org/folder", cache=tmp_path / "cache")
    assert made.config == resolve(str(source)).config
    next(tmp_path.glob("hub/*/snapshots/*/*.safetensors")).unlink()
    assert find_local(HubName("org/folder"), MEMORY) is None


@pytest.mark.parametrize("is_redirected", [False, True])
def test_a_download_that_breaks_off_goes_on_where_it_was(hub: HubStandIn, tmp_path: Path, is_redirected: bool) -> None:
    hub.shelves["org/name"].is_redirected = is_redirected
    hub.misdeeds.extend(["break", "429", "break", "", ""])
    assert fetch().read_bytes() == DATA
    assert hub.num_bytes_sent == len(DATA)


def test_a_later_process_goes_on_where_one_was_killed(hub: HubStandIn, tmp_path: Path) -> None:
    hub.misdeeds.extend(["break", *["500"] * 6])
    with raises_code(CheckpointError, "unexpected_status"):
        fetch()
    (part,) = incomplete(tmp_path)
    assert 0 < part.stat().st_size < len(DATA)
    assert kept(tmp_path) == {}
    assert fetch().read_bytes() == DATA
    assert hub.num_bytes_sent == len(DATA)
    assert incomplete(tmp_path) == []


def test_a_server_that_heeds_no_range_begins_anew(hub: HubStandIn, tmp_path: Path) -> None:
    hub.misdeeds.extend(["break", "whole"])
    assert fetch().read_bytes() == DATA


@pytest.mark.parametrize("misdeed", ["wrong", "more"])
def test_other_bytes_than_told_are_thrown_away(hub: HubStandIn, tmp_path: Path, misdeed: str) -> None:
    hub.misdeeds.append(misdeed)
    with raises_code(CheckpointError, "wrong_content"):
        fetch()
    assert kept(tmp_path) == {}
    assert incomplete(tmp_path) == []
    assert fetch().read_bytes() == DATA


def test_bytes_that_changed_on_disk_are_noticed_before_the_file_gets_its_name(hub: HubStandIn, tmp_path: Path) -> None:
    hub.misdeeds.extend(["break", *["500"] * 6])
    with pytest.raises(CheckpointError):
        fetch()
    (part,) = incomplete(tmp_path)
    part.write_bytes(bytes(part.stat().st_size))
    with raises_code(CheckpointError, "wrong_content"):
        fetch()
    assert (kept(tmp_path), incomplete(tmp_path)) == ({}, [])


def test_small_files_are_checked_by_the_name_git_gives_them(hub: HubStandIn, tmp_path: Path) -> None:
    hub.shelves["org/name"] = Shelf({"model-Q8_0.gguf": b"tiny"}, told={"model-Q8_0.gguf": {"blobId": "a" * 40}})
    with raises_code(CheckpointError, "wrong_content"):
        fetch()


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"size": -1}, "invalid_file_size"),
        ({"size": 1 << 60}, "invalid_file_size"),
        ({"size": None}, "invalid_file_size"),
        ({"sha256": "../../../etc"}, "invalid_digest"),
        ({"sha256": "A" * 64}, "invalid_digest"),
    ],
)
def test_what_the_hub_cannot_mean_is_refused(
    hub: HubStandIn, tmp_path: Path, claims: dict[str, object], code: str
) -> None:
    hub.shelves["org/name"].told["model-Q8_0.gguf"] = claims
    with raises_code(CheckpointError, code):
        fetch()
    assert kept(tmp_path) == {}


def test_a_commit_that_is_none_is_refused(hub: HubStandIn) -> None:
    hub.shelves["org/name"].commit = "../../x"
    with raises_code(CheckpointError, "invalid_commit"):
        fetch()


def test_names_that_lead_elsewhere_are_left_out(hub: HubStandIn, tmp_path: Path) -> None:
    data = dict.fromkeys(("../evil-Q8_0.gguf", "/etc/evil-Q8_0.gguf", ".hidden-Q8_0.gguf", "a/../b-Q8_0.gguf"), DATA)
    hub.shelves["org/name"] = Shelf({**data, "fine-Q4_0.gguf": DATA[:100]})
    assert fetch().name == "fine-Q4_0.gguf"
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    "name", ["..", "a/../b", "/a", "a//b", "a\\b", ".git", "a\nb", "a\0", "a/b/c/d", "a.", "x" * 300, ""]
)
def test_a_name_must_lie_in_its_folder(name: str) -> None:
    assert not is_safe_name(name)


def test_a_repository_that_asks_for_terms_says_what_to_do(hub: HubStandIn) -> None:
    hub.shelves["org/name"].is_gated = True
    with raises_code(CheckpointError, "terms_not_accepted"):
        fetch()


def test_a_repository_that_is_not_there_says_what_to_do(hub: HubStandIn) -> None:
    with raises_code(CheckpointError, "repository_not_found"):
        fetch("org/other")
    hub.token = "secret"  # noqa: S105
    with raises_code(CheckpointError, "repository_not_found"):
        fetch()


def test_a_hub_that_asks_for_a_pause_is_told_as_such(hub: HubStandIn) -> None:
    hub.misdeeds.append("busy")
    with raises_code(CheckpointError, "rate_limited"):
        fetch()


def test_a_hub_out_of_reach_is_told_as_such(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with raises_code(CheckpointError, "hub_not_reachable"):
        fetch()


def test_a_repository_without_models_says_so(hub: HubStandIn) -> None:
    hub.shelves["org/name"] = Shelf({"README.md": b"words"})
    with raises_code(CheckpointError, "no_model_files"):
        fetch()


def test_a_model_that_fits_nowhere_says_how_much_it_needs(hub: HubStandIn) -> None:
    with raises_code(CheckpointError, "no_variant_fits"):
        pull(HubName("org/name"), 1 << 20, quiet, ignore_judged)


def test_formats_that_nobody_here_runs_are_named(hub: HubStandIn) -> None:
    hub.shelves["org/name"] = Shelf({"model-strange.gguf": DATA})
    with raises_code(CheckpointError, "unsupported_variants"):
        fetch()


def test_a_full_disk_is_noticed_before_it_is_full(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SPARE_BYTES", 1 << 62)
    with raises_code(CheckpointError, "disk_full"):
        fetch()


def test_two_who_fetch_the_same_fetch_it_once(hub: HubStandIn, tmp_path: Path) -> None:
    both = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert kept(tmp_path) == {"model-Q8_0.gguf": DATA}
    assert hub.num_bytes_sent == len(DATA)


def test_many_who_link_the_same_file_at_once_do_not_meet(hub: HubStandIn, tmp_path: Path) -> None:
    blob = fetch().resolve()
    begin = threading.Barrier(8)
    failed: list[OSError] = []

    def link() -> None:
        for number in range(50):
            begin.wait()
            try:
                hub_files._link(blob, tmp_path / "links" / str(number))
                hub_files._write_commit(tmp_path / "main", "c" * 40)
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=link) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert {path.read_bytes() for path in (tmp_path / "links").iterdir()} == {DATA}
    assert len([*(tmp_path / "links").iterdir()]) == 50
    assert (tmp_path / "main").read_text() == "c" * 40


def test_a_file_of_the_hub_has_its_digest_as_its_name(hub: HubStandIn, tmp_path: Path) -> None:
    path = fetch()
    assert path.is_symlink()
    assert path.resolve().name == hashlib.sha256(DATA).hexdigest()


def test_a_hub_that_refuses_is_told_as_such(hub: HubStandIn) -> None:
    hub.shelves["org/name"].is_forbidden = True
    with raises_code(CheckpointError, "access_denied"):
        fetch()


def test_a_file_that_is_listed_and_not_there_is_told(hub: HubStandIn, tmp_path: Path) -> None:
    lfs = {"size": 9, "sha256": "a" * 64, "pointerSize": 134}
    hub.shelves["org/name"] = Shelf({}, told={"model-Q8_0.gguf": {"size": 9, "blobId": "b" * 40, "lfs": lfs}})
    with raises_code(CheckpointError, "unexpected_status"):
        fetch()
    assert kept(tmp_path) == {}


def test_a_repository_of_too_many_files_is_refused(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_listing, "MAX_FILES", 2)
    with raises_code(CheckpointError, "too_many_files"):
        fetch()


def test_what_is_here_is_not_fetched_again(hub: HubStandIn, tmp_path: Path) -> None:
    path = fetch()
    path.unlink()
    assert fetch() == path
    assert hub.num_bytes_sent == len(DATA)


def test_more_than_there_should_be_is_begun_anew(hub: HubStandIn, tmp_path: Path) -> None:
    hub.misdeeds.extend(["break", *["500"] * 6])
    with pytest.raises(CheckpointError):
        fetch()
    (part,) = incomplete(tmp_path)
    part.write_bytes(bytes(len(DATA) + 1))
    assert fetch().read_bytes() == DATA


def test_a_folder_that_cannot_be_written_is_told(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file, where a folder should be")
    with raises_code(CheckpointError, "folder_not_writable"):
        fetch()


def test_a_reference_to_nothing_is_no_model(hub: HubStandIn, tmp_path: Path) -> None:
    fetch()
    (reference,) = tmp_path.glob("hub/*/refs/main")
    reference.write_text("../..")
    assert find_local(HubName("org/name"), MEMORY) is None


def test_safetensors_are_here_if_all_that_belongs_to_them_is(hub: HubStandIn, tmp_path: Path) -> None:
    hub.shelves["org/one"] = Shelf({"config.json": b"{}", "model.safetensors": DATA})
    fetch("org/one")
    assert find_local(HubName("org/one"), MEMORY) is not None
    (snapshot,) = tmp_path.glob("hub/models--org--one/snapshots/*")
    (snapshot / "model.safetensors.index.json").write_text("no JSON")
    assert find_local(HubName("org/one"), MEMORY) is None


class FullDisk:
    """Opens, and takes nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, _data: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_a_disk_that_fails_is_told_at_once(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_whole = hub_download._ours_alone

    @contextmanager
    def on_a_full_disk(part: Path) -> Iterator[Any]:
        with kept_whole(part) as opened:
            yield FullDisk(opened)

    monkeypatch.setattr(hub_download, "_ours_alone", on_a_full_disk)
    with raises_code(CheckpointError, "disk_not_writable"):
        fetch()
    assert sum("resolve" in one for one in hub.requests) == 1
