"""Which engine verl's registry hands out: each case in a process that has not imported verl yet."""

import json
import os
import pickle
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import forked_ranks
from tests.verl import sft

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
STOCK = {"language_model": "MegatronEngineWithLMHead", "value_model": "MegatronEngineWithValueHead"}
OURS = {"language_model": "LanguageModelEngine", "value_model": "ValueModelEngine"}


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder for the path, where this package is installed with the entry points that it has now."""
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["verl.plugins"]
    metadata = tmp_path / "site" / "mcore_ckpt_of_this_tree-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mcore_ckpt_of_this_tree\nVersion: 0\n")
    lines = ["[verl.plugins]", *(f"{name} = {module}" for name, module in declared.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return metadata.parent


def handed_out(
    folder: Path, environment: dict[str, str], before: Callable[[], Any] | None = None, path: Path | None = None
) -> dict[str, str]:
    """The classes of engines by model type, in a process with this environment that imports verl and calls `before`."""

    def work(rank: int) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl" or "integrations.verl" in name]:
            del sys.modules[name]
        for name in [name for name in os.environ if name.startswith("VERL_")]:
            del os.environ[name]
        os.environ.update(environment)
        if path is not None:
            sys.path.insert(0, str(path))
        import verl  # noqa: F401  (has its plugins loaded)

        if before is not None:
            before()
        from verl.workers.engine import EngineRegistry

        classes = {model: EngineRegistry.get_engine_cls(model, "megatron") for model in STOCK}
        (folder / "classes.json").write_text(json.dumps({model: cls.__name__ for model, cls in classes.items()}))

    log = folder / "log"
    assert forked_ranks.run(1, work, log) == [0], log.read_text()
    return json.loads((folder / "classes.json").read_text())


def test_nothing_is_asked(tmp_path: Path, plugins: Path) -> None:
    def before() -> None:
        # It takes seconds: nobody pays for what was not asked for.
        assert "mcore_ckpt.integrations.verl.plugin" in sys.modules
        assert "mcore_ckpt.integrations.verl.engines" not in sys.modules

    assert handed_out(tmp_path, {}, before, plugins) == STOCK


def test_by_the_vendor(tmp_path: Path, plugins: Path) -> None:
    assert handed_out(tmp_path, {"VERL_ENGINE_VENDOR": "mcore_ckpt"}, path=plugins) == OURS


@pytest.mark.parametrize("module", ["plugin", "engines"])
def test_by_the_vendor_and_an_external_module(tmp_path: Path, module: str) -> None:
    environment = {
        "VERL_ENGINE_VENDOR": "mcore_ckpt",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": f"mcore_ckpt.integrations.verl.{module}",
    }
    assert handed_out(tmp_path, environment) == OURS


def test_a_registered_engine_alone_is_not_taken(tmp_path: Path) -> None:
    environment = {"VERL_USE_EXTERNAL_MODULES": "mcore_ckpt.integrations.verl.engines"}
    assert handed_out(tmp_path, environment) == STOCK


def read_options(*overrides: str) -> Any:
    """As verl's trainers read `checkpoint` of the configuration."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(sft.configuration(Path("root"), Path("model"), overrides).checkpoint)


@pytest.mark.parametrize(("vendor", "classes"), [(None, OURS), ("of others", STOCK)])
def test_by_the_options(tmp_path: Path, vendor: str | None, classes: dict[str, str]) -> None:
    def before() -> None:
        from verl.workers.config import McoreCheckpointConfig

        from mcore_ckpt import FastTier
        from mcore_ckpt.integrations.verl.options import read_options as our_options

        fast = ("+checkpoint.fast.folder=/dev/shm/run", "+checkpoint.fast.durable_every=5")
        options = read_options(sft.OURS, "+checkpoint.async_save=True", "+checkpoint.timeout_s=60", *fast)
        assert isinstance(options, McoreCheckpointConfig)
        assert (options.async_save, options.timeout_s) == (True, 60)
        assert our_options(options)["fast"] == FastTier("/dev/shm/run", durable_every=5)
        # The words of verl's own remain.
        assert (options.get("strict"), options["mbridge_config"]) == (True, {})

    environment = {} if vendor is None else {"VERL_ENGINE_VENDOR": vendor}
    assert handed_out(tmp_path, environment, before) == classes


def test_by_options_from_another_process(tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "options.pickle").write_bytes(pickle.dumps(read_options(sft.OURS)))

    def read() -> None:
        assert pickle.loads((tmp_path / "options.pickle").read_bytes()).async_save is False

    for folder in ("driver", "worker"):
        (tmp_path / folder).mkdir()
    assert handed_out(tmp_path / "driver", {}, write) == OURS
    assert handed_out(tmp_path / "worker", {}, read) == OURS
