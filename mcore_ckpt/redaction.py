"""Removes secrets from text that leaves the package: messages, log lines, events, reports, files.

`redacted` is the only place that knows what a secret looks like. It is not always certain where a secret ends, because
people also write passwords with `/`, `?` or `@` into URLs. When in doubt, `redacted` removes too much rather than too
little.

Error messages pass through `redacted` in `CheckpointError.__init__`. Records for other ranks pass through `redacted` in
`errors.to_record`, and records for listeners in `ErrorText`. `redacted` also cleans tracebacks in logs, the config's
`repr`, mount options and the arguments that argparse quotes. A store also passes the secrets of its URL to `redacted`,
because libraries quote these secrets without the URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

MASK = "***"
_NO_QUERY = "?..."
_LEAST_SECRET = 3  # the text of a shorter secret may be a part of ordinary words

# Match characters of URLs, which may be percent-encoded (once or several times) or have JSON's escaped slashes.
_AT = r"(?:@|%(?:25)*40)"
_IS = r"(?:=|%(?:25)*3D)"
_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}:(?:\\?/)+")
# A URL inside of a URL follows one of these texts. Any other `:/` can belong to a password.
_BEFORE_URL = ("::", "/", ",", "=", "&", "|", "(", "[", "{")
_ENCODED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}%(?:25)*3A(?:%(?:25)*2F|/){2}[^\s'\"<>`]*", re.IGNORECASE)
_IN_TEXT = re.compile(rf"{_START.pattern}[^\s'\"<>`]*")
# Characters that follow a URL in a sentence.
_PUNCTUATION = re.compile(r"(?<![).,;:?!\]}])[).,;:?!\]}]+$")
_QUERY = re.compile(r"\?|#|%(?:25)*3F", re.IGNORECASE)
# Text after a `#` is a query only if it has a `?` or a `=`. Otherwise the text is part of a path.
_FILLED = re.compile(rf"\?|{_IS}", re.IGNORECASE)
_PARAMETER = re.compile(rf"(?:;|%(?:25)*3B)[\w.-]+{_IS}[^/?#;]*", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:[^/?#\\]|\\(?!/))*")
_USER = re.compile(rf".*{_AT}", re.DOTALL)
_USER_END = re.compile(rf"{_AT}$")
# Matches a host, with a port or without; the end of one URL of a chain; the ARN of an access point in place of a
# bucket. Any other text with a `:` counts as a user with a password that has a `/`, `?` or `#`. A port has two digits
# or more.
_HOST = re.compile(r"[^:]*(?::\d{2,5}|::)?|\[[0-9A-Fa-f:.%]*\](?::\d*)?|arn:.*", re.DOTALL)
_PORT = re.compile(r":\d*$")
# In URLs of these schemes, the text before an `@` is a user only if it has a password. Otherwise the text is part of a
# path or, in Azure's URLs, a container.
_WITHOUT_USER = ("file:", "local:", "abfs:", "abfss:", "wasb:", "wasbs:", "az:")

# The names of options, headers and parameters that hold secrets. Other names that end in `_token` are not included,
# because models have many such options without secrets.
_NAME = r"""(?:[\w.-]{0,40}?(?:
      secret(?:[_.-]?(?:access[_.-]?)?(?:key|token))? | passw(?:or)?d | passphrase
    | (?:access|account|api|auth|shared|private|encryption|storage|signing|session|master
        |customer)[_.-]?key(?:[_.-]?id)?
    | (?:access|auth|session|security|sas|refresh|bearer|api|hf|hub|hugging_face|oauth|delegation|github|gitlab|vault
        )[_.-]?token
    | signature | credentials? | connection[_.-]?string | authorization | jsessionid | phpsessid)
  | (?<![\w.-])(?:token|auth|pass|sig|sas|pwd|delegation|sessionid|session_id|cookie))"""
# Each of the names contains one of these words. Nearly all texts contain none of these words, so this quick search is
# enough for them.
_WORD = re.compile(
    r"secret|pass|key|token|sig|cred|connection|auth|sess|sas|pwd|delegation|cookie|bearer", re.IGNORECASE
)
_NOTHING = r"(?!None\b|True\b|False\b|null\b|true\b|false\b|\*\*\*)"
_VALUE = rf"""(?:[(\[{{][^)\]}}]*[)\]}}] | \\?"(?:[^"\\]|\\[^"])*\\?" | \\?'(?:[^'\\]|\\[^'])*\\?'
    | {_NOTHING}[^\s,;&'"<>)}}\]\\]+)"""
_FLAGS = re.IGNORECASE | re.VERBOSE
_SECRET = re.compile(_NAME, _FLAGS).fullmatch
# `secret=...`, `secret%3D...`, `"secret": "..."`, `('secret', '...')`, `<Signature>...</Signature>`
_ASSIGNED = re.compile(rf"(?<![A-Za-z0-9])({_NAME}\s*{_IS}\s*)[brfu]?{_VALUE}", _FLAGS)
_ENTRY = re.compile(rf"""(\\?["']{_NAME}\\?["']\s*[:,]\s*)[brfu]?{_VALUE}""", _FLAGS)
_LINE = re.compile(rf"(^[ \t-]*{_NAME}:[ \t]+)\S+[ \t]*$", _FLAGS | re.MULTILINE)  # of YAML
_FLAG = re.compile(rf"(--(?:{_NAME}|token)\s+)(?!-){_VALUE}", _FLAGS)
_ELEMENT = re.compile(rf"(<{_NAME}(?:Provided)?>)[^<]+", _FLAGS)
# fsspec's options for S3 are called `key` and `secret`.
_KEY = re.compile(rf"""(\\?["']key\\?["']\s*[:,]\s*|(?<![\w.-])key=){_VALUE}""", _FLAGS)
_HEADER = re.compile(
    r"""((?:proxy-)?authorization["']?\s*[:=,]\s*["']?|\bx-[\w-]{0,40}(?:token|key|signature|credential)["']?:\s*["']?
        |\b(?:set-)?cookie["']?:\s*["']?)(?!\s*["']?\*\*\*)[^'"\r\n]+""",
    _FLAGS,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_RELATIVE_QUERY = re.compile(rf"\?(?=[\w.%-]+{_IS})[^\s'\"<>`]*")
# A user and a password in front of a host, without a scheme. The password may have a `/`. But if the user follows a
# `/`, or the password begins like a port, then a `/` begins a path.
_USER_AND_PASSWORD = re.compile(
    rf"(?:(?<![^\s'\"=(,\[/])[^\s:/@'\"=(,]{{1,64}}:[^\s/'\"]{{1,256}}"
    rf"|(?<![^\s'\"=(,\[])[^\s:/@'\"=(,]{{1,64}}:(?![/:]|\d{{2,5}}/)(?:(?!:/)[^\s'\"]){{1,256}}){_AT}(?=[\w\[])"
)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns a text without the secrets in it. The rest still names the host, bucket and path.

    Args:
        text: any text, such as the message of an error.
        secrets: further texts to remove, such as `secrets_of` a URL.

    Example:
        >>> redacted("cannot open simplecache::s3://KEY:SECRET@bucket/run?sig=SECRET (token=SECRET)")
        'cannot open simplecache::s3://***@bucket/run?... (token=***)'
    """
    for secret in secrets:
        text = text.replace(secret, MASK)
    text = _ENCODED.sub(lambda found: _masked(_decoded(found[0])), text)
    text = _IN_TEXT.sub(lambda found: _masked(found[0]), text)
    text = _RELATIVE_QUERY.sub(_NO_QUERY, _TOKEN.sub(MASK, text))
    if _WORD.search(text):
        text = _without_options(text)
    return _USER_AND_PASSWORD.sub(f"{MASK}@", text)


def redacted_url(url: str) -> str:
    """Removes user, password and query from a text that should be one URL, whatever characters the text has.

    Example:
        >>> redacted_url("s3:/key:it's secret@bucket/run")
        's3:/***@bucket/run'
    """
    shown = _masked(url).partition(_NO_QUERY)[0] if _START.search(url) else _without_user(url).partition("?")[0]
    return redacted(shown)


def secrets_of(url: str) -> list[str]:
    """Returns the secrets of a URL as programs may quote them: with and without the user, encoded and decoded.

    Example:
        >>> secrets_of("s3://key:pass%40word@bucket/run")
        ['key:pass%40word', 'key:pass@word', 'pass%40word', 'pass@word']
    """
    scheme = _START.search(url)
    rest = url[scheme.end() :] if scheme else url
    user = _user_of(rest, scheme[0] if scheme else "")
    query = rest[len(user) :].partition("?")[2]
    values = [value for name, _, value in (pair.partition("=") for pair in query.split("&")) if _SECRET(name)]
    user = _USER_END.sub("", user)
    found = [user, user.partition(":")[2], query, *values]
    both = [text for each in found for text in (each, unquote(each)) if len(text) >= _LEAST_SECRET]
    return sorted(dict.fromkeys(both), key=len, reverse=True)


def _without_options(text: str) -> str:
    for pattern in (_HEADER, _BEARER):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    total = 0
    for pattern in (_ASSIGNED, _ENTRY, _LINE, _FLAG, _ELEMENT):
        text, count = pattern.subn(rf"\g<1>{MASK}", text)
        total += count
    return _KEY.sub(rf"\g<1>{MASK}", text) if total else text


def _decoded(text: str) -> str:
    while not _START.match(text):
        text = unquote(text)
    return text


def _masked(text: str) -> str:
    """Returns a URL, or several URLs with no space between them, without users, passwords, parameters and queries."""
    end = _PUNCTUATION.search(text)
    url, after = (text, "") if end is None else (text[: end.start()], end[0])
    first, *more = _START.finditer(url)
    starts = [first, *(start for start in more if url.endswith(_BEFORE_URL, 0, start.start()))]
    shown = url[: starts[0].start()]
    for number, start in enumerate(starts):
        stop = starts[number + 1].start() if number + 1 < len(starts) else len(url)
        part = start[0] + _without_user(url[start.end() : stop], start[0])
        rest = _QUERY.search(part)
        # All text that follows may belong to the query, even another URL, so all of it is removed.
        if rest is not None and _FILLED.search(part, rest.start()):
            return shown + _PARAMETER.sub(f";{MASK}", part[: rest.start()]) + _NO_QUERY + after
        shown += _PARAMETER.sub(f";{MASK}", part)
    return shown + after


def _without_user(rest: str, scheme: str = "") -> str:
    user = _user_of(rest, scheme)
    if not user:
        return rest
    return f"{MASK}@{rest[len(user) :]}" if _USER.fullmatch(user) else f"{user.partition(':')[0]}:{MASK}"


def _user_of(rest: str, scheme: str) -> str:
    """Returns the user, the password and the `@` at the beginning of `rest`, which is a URL without its scheme.

    Returns all of `rest` if the text was cut before the `@`, and an empty text if there is no user.
    """
    authority = _AUTHORITY.match(rest)
    assert authority is not None, "the expression matches an empty text"
    found = _USER.match(authority[0])
    if found is None and not _HOST.fullmatch(authority[0]):
        found = _USER.match(rest)
        if found is None and not _PORT.search(authority[0]):
            return rest
    user = "" if found is None else found[0]
    return "" if scheme.lower().startswith(_WITHOUT_USER) and ":" not in unquote(user) else user
