"""Checks the form of URLs of remote stores, and shows them without their secrets. This module connects to no store."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError, InvalidTypeError
from mcore_ckpt.redaction import MASK, redacted_url

_FORM = "use a URL such as s3://bucket/prefix or file:///folder"
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*:/")  # fsspec chains URLs with `::`
# A URL of these schemes needs no bucket, container or host, so its path may follow the slashes at once.
_WITHOUT_HOST = ("file", "local", "memory", "hdfs")


def public_url(url: str) -> str:
    """Returns a URL without user, password and query."""
    return redacted_url(url).replace(f"{MASK}@", "").rstrip("/")


def checked_url(url: object) -> str:
    """Returns the URL of a remote store, with `~` replaced by the home folder.

    Raises:
        InvalidTypeError: `url` is not a text.
        InvalidArgumentError: `url` is not a URL. If it looks like a misspelled URL, the message has the right spelling.

    Example:
        >>> checked_url("s3:/bucket/run")
        Traceback (most recent call last):
        mcore_ckpt.errors.InvalidArgumentError: remote is 's3:/bucket/run': use 's3://bucket/run'
    """
    if isinstance(url, os.PathLike):
        raise InvalidTypeError(f"remote is the path {os.fspath(url)!r}: {_of_path(str(os.fspath(url)))}")
    if not isinstance(url, str):
        raise InvalidTypeError(f"remote is {url!r}: {_FORM}, as text")
    # fsspec does not expand "~", and would make a folder with that name.
    expanded = "file://" + os.path.expanduser(url.removeprefix("file://")) if url.startswith("file://~") else url
    if advice := _advice(expanded):
        shown = redacted_url(url)
        raise InvalidArgumentError(f"remote is {shown!r}: {advice if shown == url else _FORM}")
    return expanded


def local_path(path: object, name: str) -> Path:
    """Returns a path, with `~` replaced by the home folder.

    Raises:
        InvalidTypeError: `path` is not a path.
        InvalidArgumentError: `path` is empty; it is a URL, from which a folder such as `s3:` would be made; or it
            begins with `~` and a name that no user has.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InvalidTypeError(f"{name} is {path!r}: use a path, such as '/checkpoints/run'")
    text = os.fspath(path)
    if not text:
        raise InvalidArgumentError(f"{name} is empty: use a path, such as '/checkpoints/run'")
    if is_url(text) and not os.path.lexists(text):
        raise InvalidArgumentError(
            f"{name} is the URL {redacted_url(text)!r}: use the path of a folder. Only `remote` and "
            "`mcore-ckpt list --remote URL` take the URL of a store"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidArgumentError(
            f"{name} is {text!r}: this machine knows no home folder for {Path(text).parts[0]}: use the whole path"
        ) from None


def is_url(text: str) -> bool:
    """Returns True for a URL, also for a URL with too few slashes."""
    return _URL.match(text) is not None


def _advice(url: str) -> str | None:
    """Returns advice for another spelling; None if the form is right."""
    scheme, slashes, rest = url.partition("://")
    if "::" in url or url != url.strip():
        return _FORM
    if not slashes:
        return _without_slashes(url)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) or not rest.strip("/"):
        return _FORM
    if scheme in ("file", "local") and not rest.startswith("/"):
        return f"use an absolute path, such as {f'{scheme}:///{rest}'!r}"
    if rest.startswith("/") and scheme not in _WITHOUT_HOST:
        bucket = rest.lstrip("/")
        return f"use {f'{scheme}://{bucket}'!r}"
    return None


def _without_slashes(url: str) -> str:
    if not is_url(url):
        return _of_path(url) if url.startswith(("/", "~", "./", "../")) else _FORM
    scheme, _, rest = url.partition(":")
    start, rest = "/" if scheme in _WITHOUT_HOST else "", rest.lstrip("/")
    return f"use {f'{scheme}://{start}{rest}'!r}"


def _of_path(path: str) -> str:
    return f"use {'file://' + os.path.abspath(os.path.expanduser(path))!r}"
