"""Lists a Hub repository through huggingface_hub, and validates the names, sizes, commits and digests in the response
before they are used in paths.
"""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.hub.variants import HubFile, Variant, variants_of
from quire.errors import CheckpointError

SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._+@=,()-]{0,199}")
MAX_DEPTH = 3
MAX_FILES = 10_000
MAX_FILE_BYTES = 1 << 44
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Repository:
    """A validated listing of a repository."""

    name: str
    commit: str
    variants: tuple[Variant, ...]


def listed(name: str) -> Repository:
    """Request a repository's files from the Hub. Raises CheckpointError."""
    import huggingface_hub

    with hub_errors(name):
        info = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise _odd(name, "invalid_commit", f"invalid commit {str(info.sha)[:60]!r}")
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise _odd(name, "too_many_files", f"expected at most {MAX_FILES:,} files, got {len(siblings):,}")
    files = [_checked(name, one) for one in siblings if is_safe_name(one.rfilename)]
    return Repository(name, info.sha, tuple(variants_of(files)))


def is_safe_name(name: str) -> bool:
    """Whether a relative path stays inside its folder on every operating system, and names no hidden file."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(
        SAFE_PART.fullmatch(part) and not part.endswith((".", " ")) for part in parts
    )


def _checked(repository: str, sibling: Any) -> HubFile:
    lfs = sibling.lfs
    size = lfs.size if lfs is not None else sibling.size
    sha256, sha1 = lfs.sha256 if lfs is not None else None, sibling.blob_id
    if not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
        raise _odd(repository, "invalid_file_size", f"invalid size {size!r} of {sibling.rfilename}")
    digest, pattern = (sha256, SHA256) if lfs is not None else (sha1, COMMIT)
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise _odd(repository, "invalid_digest", f"invalid digest {str(digest)[:80]!r} of {sibling.rfilename}")
    return HubFile(sibling.rfilename, size, sha256, None if lfs is not None else sha1)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Convert the exceptions of huggingface_hub to CheckpointErrors with advice."""
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
        raise _not_downloaded(name, "terms_not_accepted", why) from error
    except RepositoryNotFoundError as error:
        why = "the hub has no such repository, or you may not see it; check the spelling, or set HF_TOKEN"
        raise _not_downloaded(name, "repository_not_found", why) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(f"{name!r} is not in the local cache, and {offline}", code="hub_offline") from error
    except HfHubHTTPError as error:
        raise _not_downloaded(name, *_description(error)) from error
    except Exception as error:  # errors of the library's HTTP client
        is_of_the_network = _is_of_the_network(error)
        why = f"{'the hub is not reachable: ' if is_of_the_network else ''}{str(error)[:200]}"
        why += "; partial downloads are kept: try again, or give a local file"
        raise _not_downloaded(name, "hub_not_reachable" if is_of_the_network else "download_failed", why) from error


def _is_of_the_network(error: BaseException | None) -> bool:
    """Whether no connection was made: HTTP clients wrap the system's error in their own types, so follow the causes."""
    while error is not None and not isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        error = error.__cause__ or error.__context__
    return error is not None


def _description(error: Any) -> tuple[str, str]:
    """Return the error code and reason for an HTTP error response."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        why = "the hub limits the request rate (429); try again in some minutes, or set HF_TOKEN for a higher limit"
        return "rate_limited", why
    if status in (401, 403):
        return "access_denied", f"the hub denied access ({status}); set HF_TOKEN to a token with read access"
    return "unexpected_status", f"the hub responded with {status}: {str(error)[:200]}; try again later"


def _not_downloaded(name: str, code: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name!r} cannot be downloaded: {why}", code=code)


def _odd(name: str, code: str, what: str) -> CheckpointError:
    return CheckpointError(f"unexpected hub response for {name}: {what}; try again, or use another mirror", code=code)
