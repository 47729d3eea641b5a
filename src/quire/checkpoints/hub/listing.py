"""What the hub tells of a repository, asked by its own library and checked: names, sizes, commits and digests are not
trusted before a path is made of them.
"""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.hub.variants import HubFile, Variant, variants_of
from quire.errors import CheckpointError

BESIDE_WEIGHTS = ("*.json", "*.jinja", "tokenizer.model")
SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._+@=,()-]{0,199}")
MAX_DEPTH = 3
MAX_FILES = 10_000
MAX_FILE_BYTES = 1 << 44
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub tells of one, checked."""

    name: str
    commit: str
    variants: tuple[Variant, ...]


def listed(name: str) -> Repository:
    """Ask the hub what the repository has."""
    import huggingface_hub

    with hub_errors(name):
        info = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise _odd(name, f"invalid commit {str(info.sha)[:60]!r}")
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise _odd(name, f"expected at most {MAX_FILES:,} files, got {len(siblings):,}")
    files = [_checked(name, one) for one in siblings if is_safe_name(one.rfilename)]
    return Repository(name, info.sha, tuple(variants_of(files, BESIDE_WEIGHTS)))


def is_safe_name(name: str) -> bool:
    """Whether a file of this name lies inside of its folder on any system, and is not hidden."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(
        SAFE_PART.fullmatch(part) and not part.endswith((".", " ")) for part in parts
    )


def _checked(repository: str, sibling: Any) -> HubFile:
    lfs = sibling.lfs
    size = lfs.size if lfs is not None else sibling.size
    sha256, sha1 = lfs.sha256 if lfs is not None else None, sibling.blob_id
    if not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
        raise _odd(repository, f"invalid size {size!r} of {sibling.rfilename}")
    digest, pattern = (sha256, SHA256) if lfs is not None else (sha1, COMMIT)
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise _odd(repository, f"invalid digest {str(digest)[:80]!r} of {sibling.rfilename}")
    return HubFile(sibling.rfilename, size, sha256, None if lfs is not None else sha1)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """What the hub's library raises becomes a CheckpointError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    offline = "the hub is not reachable or HF_HUB_OFFLINE is set; connect once to download it, or give a local file"
    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError as error:
        why = "its owner requires you to accept terms first; do so on its page and set HF_TOKEN"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}") from error
    except RepositoryNotFoundError as error:
        why = "the hub has no such repository, or you may not see it; check the spelling, or set HF_TOKEN"
        raise CheckpointError(f"{name!r} cannot be downloaded: {why}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(f"{name!r} is not in the local cache, and {offline}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name!r} cannot be downloaded: {_description(error)}") from error
    except Exception as error:  # the library lets those of its HTTP client through
        why = "the hub is not reachable: " if _is_of_the_network(error) else ""
        raise CheckpointError(
            f"{name!r} cannot be downloaded: {why}{str(error)[:200]}; partial downloads are kept: try again, or give a "
            "local file"
        ) from error


def _is_of_the_network(error: BaseException | None) -> bool:
    """No connection came about: its HTTP clients say so in types of their own, behind which the system's stand."""
    while error is not None and not isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        error = error.__cause__ or error.__context__
    return error is not None


def _description(error: Any) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        return "the hub limits the request rate (429); try again in some minutes, or set HF_TOKEN for a higher limit"
    if status in (401, 403):
        return f"the hub denied access ({status}); set HF_TOKEN to a token with read access"
    return f"the hub responded with {status}: {str(error)[:200]}; try again later"


def _odd(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"unexpected hub response for {name}: {what}; try again, or use another mirror")
