"""Lists a Hub repository through huggingface_hub. Names, sizes, commits and digests in the response are validated
before any of them is used in a path.
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


def list_repository(name: str) -> Repository:
    """Request a repository's files from the Hub. Raises CheckpointError."""
    import huggingface_hub

    with hub_errors(name):
        info = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise _hub_error(name, "invalid_commit", f"invalid commit {str(info.sha)[:60]!r}")
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise _hub_error(name, "too_many_files", f"expected at most {MAX_FILES:,} files, got {len(siblings):,}")
    files = [_hub_file(name, sibling) for sibling in siblings if is_safe_name(sibling.rfilename)]
    return Repository(name, info.sha, tuple(variants_of(files)))


def is_safe_name(name: str) -> bool:
    """Whether a relative path stays inside its folder on every operating system, and is not hidden."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(
        SAFE_PART.fullmatch(part) and not part.endswith((".", " ")) for part in parts
    )


def _hub_file(repository: str, sibling: Any) -> HubFile:
    lfs = sibling.lfs
    size = lfs.size if lfs is not None else sibling.size
    sha256, sha1 = lfs.sha256 if lfs is not None else None, sibling.blob_id
    if not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
        raise _hub_error(repository, "invalid_file_size", f"invalid size {size!r} of {sibling.rfilename}")
    digest, pattern = (sha256, SHA256) if lfs is not None else (sha1, COMMIT)
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        raise _hub_error(repository, "invalid_digest", f"invalid digest {str(digest)[:80]!r} of {sibling.rfilename}")
    return HubFile(sibling.rfilename, size, sha256, None if lfs is not None else sha1)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Convert the exceptions of huggingface_hub to CheckpointErrors with a hint what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    offline = "the hub is not reachable or HF_HUB_OFFLINE is set; connect once to download it, or pass a local file"
    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError as error:
        reason = "its owner requires you to accept terms first; do so on its page and set HF_TOKEN"
        raise _not_downloaded(name, "terms_not_accepted", reason) from error
    except RepositoryNotFoundError as error:
        reason = "the hub has no such repository, or your account has no access to it; check the name, or set HF_TOKEN"
        raise _not_downloaded(name, "repository_not_found", reason) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(f"{name!r} is not in the local cache, and {offline}", code="hub_offline") from error
    except HfHubHTTPError as error:
        raise _not_downloaded(name, *_describe_response(error)) from error
    except Exception as error:  # errors of the library's HTTP client
        is_unreachable = _is_connection_error(error)
        reason = f"{'the hub is not reachable: ' if is_unreachable else ''}{str(error)[:200]}"
        reason += "; partial downloads are kept: try again, or pass a local file"
        raise _not_downloaded(name, "hub_not_reachable" if is_unreachable else "download_failed", reason) from error


def _is_connection_error(error: BaseException | None) -> bool:
    """Whether the connection failed. HTTP clients wrap the system's error in their own types, so examine the causes."""
    while error is not None and not isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        error = error.__cause__ or error.__context__
    return error is not None


def _describe_response(error: Any) -> tuple[str, str]:
    """Return the error code and reason for an HTTP error response."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        reason = "the hub limits the request rate (429); try again in some minutes, or set HF_TOKEN for a higher limit"
        return "rate_limited", reason
    if status in (401, 403):
        return "access_denied", f"the hub denied access ({status}); set HF_TOKEN to a token with read access"
    return "unexpected_status", f"the hub responded with {status}: {str(error)[:200]}; try again later"


def _not_downloaded(name: str, code: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name!r} cannot be downloaded: {reason}", code=code)


def _hub_error(name: str, code: str, fault: str) -> CheckpointError:
    return CheckpointError(f"unexpected hub response for {name}: {fault}; try again, or use another mirror", code=code)
