"""The redactor: nothing of a secret comes out of it, and what is left says where."""

import json
import re
import time

import pytest

from mcore_ckpt.redaction import redacted, redacted_url, secrets_of

# Every secret has this word in it, and also what a wrong cut would leave of it.
WORD = "S3CRET"

# Each text, and what must still be readable of it.
FORMS = [
    # -- a user and a password
    ("s3://key:S3CRET@bucket/run", "bucket/run"),
    ("s3://S3CRET@bucket/run", "bucket/run"),
    ("s3:/key:S3CRET@bucket/run", "bucket/run"),
    ("S3://key:S3CRET@bucket/run", "bucket/run"),
    ("hdfs://user:S3CRET@namenode:8020/run", "namenode:8020/run"),
    ("https://user:S3CRET@[2001:db8::1]:9000/bucket/run", "[2001:db8::1]:9000/bucket/run"),
    ("ftp://user@corp.com:S3CRET@host/run", "host/run"),
    ("s3://key:S3CRET@S3CRET@bucket/run", "bucket/run"),
    ("s3://key:S3CRET/S3CRET+S3CRET@bucket/run", "bucket/run"),
    ("s3://key:/S3CRET@bucket/run", "bucket/run"),
    ("s3://key:S3CRET?S3CRET@bucket/run", "bucket/run"),
    ("s3://key:S3CRET#S3CRET@bucket/run", "bucket/run"),
    ("s3://key:S3CRET:/S3CRET@bucket/run", "bucket/run"),
    ("s3://key:S3CRET%2FS3CRET%40S3CRET@bucket/run", "bucket/run"),
    ("s3://key:S3CRET%40bucket/run", "bucket/run"),
    ("s3://key%3AS3CRET%40bucket/run", "bucket/run"),
    ("s3://key:S3CRET", "s3://key"),
    ("sftp://user:S3CRET@host:22/run.1,", "host:22/run.1"),
    ("redis://:S3CRET@host:6379/0", "host:6379/0"),
    ("smb://group;user:S3CRET@server/share", "server/share"),
    ("abfs://container:S3CRET@account.dfs.core.windows.net/run", "account.dfs.core.windows.net/run"),
    ("memory://user:S3CRET@store/run", "memory://", "store/run"),
    ("cannot open 's3://key:S3CRET@bucket/run' (denied)", "bucket/run", "(denied)"),
    ("b's3://key:S3CRET@bucket/run'", "bucket/run"),
    ("[PosixPath('s3:/key:S3CRET@bucket/run')]", "bucket/run"),
    ("//user:S3CRET@server/share", "server/share"),
    ("no route for user:S3CRET@host", "no route for", "host"),
    ("no route for user:S3CRET/S3CRET@host", "no route for", "host"),
    # -- several URLs in one
    ("simplecache::s3://key:S3CRET@bucket/run", "simplecache::s3://", "bucket/run"),
    ("zip://a.pt::https://user:S3CRET@host/run.zip?sig=S3CRET", "zip://a.pt::", "host/run.zip"),
    ("filecache::zip://a::s3://key:S3CRET/S3CRET@bucket/run", "filecache::zip://a::", "bucket/run"),
    ("reference::https://user:S3CRET@host/a::s3://key:S3CRET@bucket/b", "host/a", "bucket/b"),
    ("s3://key:S3CRET@one/run,s3://key:S3CRET@two/run", "one/run", "two/run"),
    ("https://proxy/https://user:S3CRET@host/run", "proxy", "host/run"),
    ("https://host/run?next=https://user:S3CRET@other/x&code=S3CRET", "host/run"),
    # -- queries, parameters, fragments
    ("https://host/run?X-Amz-Credential=S3CRET&X-Amz-Signature=S3CRET", "host/run"),
    ("https://account.blob.core.windows.net/c/run?sv=2024&sp=r&sig=S3CRET%3D", "account.blob.core.windows.net/c/run"),
    ("https://host/run?access_key=S3CRET)", "host/run"),
    ("gs://bucket/run?token=S3CRET. Try again", "bucket/run", "Try again"),
    ("https://host/run?S3CRET", "host/run"),
    ("https://host/run%3Fsig%3DS3CRET", "host/run"),
    ("https://host/run%253Ftoken%253DS3CRET", "host/run"),
    ("https://host/app;jsessionid=S3CRET/run", "host/app", "/run"),
    ("https://host/app;jsessionid=S3CRET?x=1", "host/app"),
    ("https://host/app%3Bjsessionid%3DS3CRET", "host/app"),
    ("https://host/run#access_token=S3CRET", "host/run"),
    ("Max retries exceeded with url: /run?X-Amz-Signature=S3CRET (Caused by timeout)", "/run", "Caused by timeout"),
    # -- encoded as a whole
    ("https%3A%2F%2Fuser%3AS3CRET%40host%2Frun%3Fsig%3DS3CRET", "host/run"),
    ("https%253A%252F%252Fuser%253AS3CRET%2540host%252Frun", "host/run"),
    ("https://proxy/https%3a%2f%2fuser%3aS3CRET%40host%2frun", "proxy", "host/run"),
    (json.dumps({"url": "https://user:S3CRET@host/run"}).replace("/", "\\/"), "host"),
    # -- options
    (str({"key": "S3CRET", "secret": "S3CRET", "endpoint_url": "http://minio:9000"}), "http://minio:9000"),
    (json.dumps({"account_name": "a", "account_key": "S3CRET=="}), '"account_name": "a"'),
    (str({"token": "S3CRET", "project": "p"}), "'project': 'p'"),
    (str({"client_kwargs": {"aws_secret_access_key": "S3CRET", "region_name": "r"}}), "'region_name': 'r'"),
    (str({"password": b"S3CRET", "host": "h"}), "'host': 'h'"),
    (json.dumps(json.dumps({"session_token": "S3CRET", "host": "h"})), "host"),
    ("S3FileSystem(key='S3CRET', secret=\"S3CRET's\", anon=False)", "S3FileSystem", "anon=False"),
    ("AWS_SECRET_ACCESS_KEY=S3CRET AWS_REGION=r", "AWS_REGION=r"),
    ("fs.s3a.secret.key=S3CRET,fs.s3a.endpoint=e", "fs.s3a.endpoint=e"),
    ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=S3CRET==;EndpointSuffix=e", "AccountName=a", "=e"),
    ("rw,username=me,password=S3CRET,vers=3", "username=me", "vers=3"),
    ("get('http://proxy:3128/run', auth=('user', 'S3CRET'), timeout=5)", "http://proxy:3128/run", "timeout=5"),
    ("unrecognized arguments: --password S3CRET --token S3CRET --root /data", "--root /data"),
    ("s3:\n  secret: S3CRET\n  - token: S3CRET\n  region: r", "region: r"),
    ("Credentials(access_key='S3CRET', secret_key='S3CRET', session_token='S3CRET', method='env')", "method='env'"),
    # -- headers and answers
    ("{'Authorization': 'Bearer S3CRET', 'Host': 'h'}", "'Host': 'h'"),
    ("Authorization: AWS4-HMAC-SHA256 Credential=S3CRET/x, Signature=S3CRET\nHost: h", "Host: h"),
    ("x-amz-security-token: S3CRET\nhost: h", "host: h"),
    ("[('Cookie', 'S3CRET'), ('Host', 'h')]", "'h'"),
    ("<Code>Denied</Code><AWSAccessKeyId>S3CRET</AWSAccessKeyId><Bucket>b</Bucket>", "Denied", "<Bucket>b"),
    ("<SignatureProvided>S3CRET</SignatureProvided><Key>run</Key>", "<Key>run"),
    ("the key AKIAIOSFODNN7S3CRETX of bucket b", "bucket b"),
    ("hf_S3CRETabcdefghijkl may not read owner/name", "owner/name"),
]

# What has no secret, and must stay as it is.
PLAIN = [
    "rank 3: /data/run@2/global_steps_10/actor: its CRC is wrong: read it again?",
    "s3://bucket/run/global_steps_10",
    "s3://bucket/run@2024/part#3",
    "hdfs://namenode:8020/user/me@corp/run",
    "file:///data/me@corp/run",
    "abfs://container@account.dfs.core.windows.net/run",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/run",
    "http://[::1]:9000/run",
    "config.json: eos_token='</s>', bos_token_id=5, pad_token=None, tokenizer=a",
    "MCORE_CKPT_SECRET: has 5 bytes: use at least 16 random bytes",
    "the keys are 'key', 'embedding.weight': use --ignore",
    "layers.0.attention.key.weight = 1",
    "did you mean 'max_to_keep'? the options are a, b",
    "container at host:8020/user/me@corp",
    "process 17 on node7:2",
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: re.sub(r"\W+", "-", form[0])[:40])
def test_no_secret_comes_out(form: tuple[str, ...]) -> None:
    text, *readable = form
    shown = redacted(text)
    assert WORD not in shown
    assert "S3C" not in shown
    for each in readable:
        assert each in shown
    assert redacted(shown) == shown  # a message of ours may quote another one


@pytest.mark.parametrize("text", PLAIN, ids=lambda text: re.sub(r"\W+", "-", text)[:40])
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ('s3://key:it\'s S3CRET "x"@bucket/run', "s3://***@bucket/run"),
        ("key:S3CRET/S3CRET@bucket/run?S3CRET", "***@bucket/run"),
        ("simplecache::s3://key:S3CRET@bucket/run?a=S3CRET", "simplecache::s3://***@bucket/run"),
        ("/data/run@2", "/data/run@2"),
    ],
)
def test_a_text_that_should_be_a_url(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


def test_what_libraries_quote_alone() -> None:
    known = secrets_of("s3://key:S3CRET%2Fone@bucket/run?token=S3CRET-two&region=r")
    for quoted in ("S3CRET/one", "S3CRET%2Fone", "key:S3CRET/one", "S3CRET-two"):
        assert WORD not in redacted(f"denied: {quoted!r} in bucket, region r", known)
    assert redacted("bucket, region r", known) == "bucket, region r"
    for url in ("s3://bucket/run", "abfs://container@account.dfs.core.windows.net/run", "file:///data/me@corp"):
        assert secrets_of(url) == []


@pytest.mark.parametrize(
    "part", ["a", "a-", "x-", "a@", "a:", ";a=", "http://", "#", "%3F", "%25", ")", "'", 'password="']
)
def test_a_long_text_takes_no_long(part: str) -> None:
    """An expression that goes back and forth would need minutes."""
    started = time.process_time()
    redacted("http://host/" + part * 40_000)
    assert time.process_time() - started < 20
