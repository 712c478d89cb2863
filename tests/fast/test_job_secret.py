"""The secret of a job's nodes: where it comes from, who can read it meanwhile, and what is refused."""

import os
import stat
from dataclasses import asdict
from pathlib import Path

import pytest

from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.fast.job_secret import FILE_VARIABLE, VARIABLE, SecretOffer, given_secret, same_secrets

OWN = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


def sent(offer: SecretOffer) -> SecretOffer:
    """What another rank gets through the key-value store."""
    return SecretOffer(**asdict(offer))


def test_a_file_has_it_for_a_moment(tmp_path: Path) -> None:
    root = tmp_path / "root"
    offer = SecretOffer.make(None, root, "actor")
    (file,) = root.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = sent(offer).take(None)
    assert secret == offer.take(None)
    assert secret.hex() not in str(asdict(offer))
    assert file.read_bytes().hex() not in str(asdict(offer))
    offer.remove()
    assert not list(root.iterdir())
    offer.remove()


def test_what_a_killed_start_has_left_is_removed(tmp_path: Path) -> None:
    SecretOffer.make(None, tmp_path, "actor")
    other = SecretOffer.make(None, tmp_path, "critic")
    SecretOffer.make(None, tmp_path, "actor").remove()
    assert [str(path) for path in tmp_path.iterdir()] == [other.path]


def test_several_trainers_have_several_secrets(tmp_path: Path) -> None:
    for given, folder in ((OWN, None), (None, tmp_path)):
        offers = [SecretOffer.make(given, folder, role) for role in ("actor", "critic")]
        assert len({offer.take(given) for offer in offers}) == 2


def test_the_users_secret_is_not_sent(tmp_path: Path) -> None:
    offer = SecretOffer.make(OWN, tmp_path, "actor")
    assert not list(tmp_path.iterdir())
    assert offer.take(OWN).hex() not in str(asdict(offer))
    with pytest.raises(InvalidArgumentError, match=r"MCORE_CKPT_SECRET or .*: has another secret here than on rank 0"):
        offer.take(OWN + b"!")


def test_without_a_folder_the_store_has_it(caplog: pytest.LogCaptureFixture) -> None:
    offer = SecretOffer.make(None, None, "actor")
    assert sent(offer).take(None) == offer.take(None)
    assert "anybody who reaches its port (MASTER_PORT) can read: set MCORE_CKPT_SECRET_FILE" in caplog.text


def test_a_rank_that_sees_another_folder(tmp_path: Path) -> None:
    offer = SecretOffer.make(None, tmp_path, "actor")
    assert offer.path is not None
    os.unlink(offer.path)
    with pytest.raises(CheckpointNotFoundError, match=r"is not there, although rank 0 has.*set MCORE_CKPT"):
        offer.take(None)
    Path(offer.path).write_bytes(OWN)
    os.chmod(offer.path, 0o600)
    with pytest.raises(InvalidArgumentError, match="has another secret here than on rank 0"):
        offer.take(None)


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert given_secret() is None
    monkeypatch.setenv(VARIABLE, "")
    assert given_secret() is None
    monkeypatch.setenv(VARIABLE, OWN.decode())
    assert given_secret() == OWN
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(InvalidArgumentError, match="MCORE_CKPT_SECRET: has 5 bytes: use at least 16"):
        given_secret()
    file = tmp_path / "secret"
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    with pytest.raises(InvalidArgumentError, match="secret: cannot be read: No such file"):
        given_secret()
    file.write_bytes(b"\xff" + OWN + b"\n")
    file.chmod(0o640)
    with pytest.raises(InvalidArgumentError, match=r"other users may read or change it \(mode 0640\): chmod 600 it"):
        given_secret()
    file.chmod(0o600)
    assert given_secret() == b"\xff" + OWN
    file.write_bytes(b"x" * 5000)
    with pytest.raises(InvalidArgumentError, match="has more than 4096 bytes, so it is no secret"):
        given_secret()
    file.write_bytes(b"\n")
    with pytest.raises(InvalidArgumentError, match="MCORE_CKPT_SECRET_FILE: has 0 bytes"):
        given_secret()


def test_a_file_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(OWN)
    file.chmod(0o600)
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    if file.stat().st_uid == 0:
        assert given_secret() == OWN  # what root has given, such as a secret that Kubernetes mounts
        os.chown(file, 4711, -1)
    with pytest.raises(InvalidArgumentError, match="belongs to user"):
        given_secret()


def test_all_ranks_have_one_or_none() -> None:
    same_secrets([{"secret": "one"}, {"secret": "one"}])
    with pytest.raises(InvalidArgumentError, match="rank 0 has one, rank 1 has none"):
        same_secrets([{"secret": "one"}, {"secret": "none"}])
