"""A trainer's choices are checked when they are made."""

from typing import Any

import pytest

from mcore_ckpt.config import CONTENT_WORDS, CheckpointConfig, FastTier


def test_what_verl_writes_is_accepted() -> None:
    config = CheckpointConfig(save_contents=["model", "optimizer"], load_contents=["model"])  # type: ignore[arg-type]
    assert (config.save_contents, config.load_contents) == (("model", "optimizer"), ("model",))
    assert set(CheckpointConfig().save_contents) == set(CONTENT_WORDS) - {"hf_model"}
    assert CheckpointConfig(max_to_keep=1, timeout_s=0.5, roles=("actor", "critic-2")).max_to_keep == 1


def test_saves_wait_and_raise_unless_asked_otherwise() -> None:
    config = CheckpointConfig()
    assert (config.async_save, config.async_mode, config.if_busy, config.if_failed) == (
        False,
        "snapshot",
        "wait",
        "raise",
    )
    assert (config.shared_writes, config.max_host_bytes) == (True, None)
    for mode in ("snapshot", "lazy"):
        assert CheckpointConfig(async_save=True, async_mode=mode, if_busy="raise", if_failed="warn").async_save
    assert CheckpointConfig(max_host_bytes=1, shared_writes=False).max_host_bytes == 1


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"save_contents": ("model", "optimiser")}, "has 'optimiser': the allowed words are model, optimizer"),
        ({"load_contents": ("model", 3)}, "load_contents has 3"),
        ({"save_contents": "model"}, "save_contents is the string 'model': use a list"),
        ({"save_contents": ()}, "save_contents is empty"),
        ({"max_to_keep": 0}, "max_to_keep is 0"),
        ({"max_to_keep": -1}, "max_to_keep is -1"),
        ({"max_to_keep": 1, "keep_every": 0}, "keep_every is 0: use 1 or more"),
        ({"max_to_keep": 1, "keep_every": 2.5}, r"keep_every is 2\.5"),
        ({"keep_every": 100}, "keep_every is given without max_to_keep"),
        ({"async_mode": "eager"}, "async_mode is 'eager': use one of 'snapshot', 'lazy'"),
        ({"if_busy": "never"}, "if_busy is 'never': use one of 'wait', 'raise', 'skip'"),
        ({"if_failed": None}, "if_failed is None: use one of 'raise', 'warn'"),
        ({"max_host_bytes": 0}, "max_host_bytes is 0: use 1 or more"),
        ({"max_host_bytes": -1}, "max_host_bytes is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CheckpointConfig(**choices)


def test_roles_are_a_list_of_names() -> None:
    assert CheckpointConfig(roles=["actor", "critic"]).roles == ("actor", "critic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the string 'actor'"):
        CheckpointConfig(roles="actor")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choices", "error", "reason"),
    [
        ({"folder": "relative/run"}, ValueError, "folder of the fast tier is 'relative/run': use an absolute path"),
        ({"folder": ""}, ValueError, "folder of the fast tier is empty"),
        ({"folder": "s3://run"}, ValueError, "folder of the fast tier is the URL 's3://run': use the path of a folder"),
        ({"replicas": -1}, ValueError, "replicas of the fast tier is -1: use 0 or more"),
        ({"replicas": True}, ValueError, "replicas of the fast tier is True"),
        ({"replicas": None}, ValueError, "replicas of the fast tier is None"),
        ({"keep": 0}, ValueError, "keep of the fast tier is 0: use 1 or more"),
        ({"keep": 1.5}, ValueError, r"keep of the fast tier is 1\.5"),
        ({"durable_every": 0}, ValueError, "durable_every of the fast tier is 0: use 1 or more, or None"),
        ({"durable_every": "10"}, ValueError, "durable_every of the fast tier is '10'"),
        ({"bytes_per_s": 0}, ValueError, "bytes_per_s of the fast tier is 0: use 1 or more, or None"),
        ({"bytes_per_s": 1e9}, ValueError, r"bytes_per_s of the fast tier is 1000000000\.0"),
        ({"domain": "rack3"}, TypeError, "domain of the fast tier is 'rack3': use a function without arguments"),
        ({"folder": None}, TypeError, "folder of the fast tier is None: use a path"),
        ({"folder": 7}, TypeError, "folder of the fast tier is 7: use a path"),
        ({"folder": b"/dev/shm/run"}, TypeError, "folder of the fast tier is b'/dev/shm/run': use a path"),
    ],
)
def test_a_fast_tier_that_cannot_be_is_refused_by_name(
    choices: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        FastTier(**{"folder": "/dev/shm/run", **choices})


def test_fast_tiers() -> None:
    fast = FastTier("~/run", replicas=0, keep=1, durable_every=None, bytes_per_s=1, domain=lambda: "rack3")
    assert CheckpointConfig(fast=fast).fast == fast
    assert CheckpointConfig().fast is None
    assert (FastTier("/a").replicas, FastTier("/a").keep, FastTier("/a").durable_every) == (1, 2, 10)
    with pytest.raises(TypeError, match="fast is '/dev/shm/run': use a FastTier, or None"):
        CheckpointConfig(fast="/dev/shm/run")  # type: ignore[arg-type]
