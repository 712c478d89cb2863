"""verl 0.6 to 0.8 by one line of configuration: each case in a process that has not imported verl yet."""

import pickle
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import verl
from packaging.version import parse

from tests.distributed import forked_ranks
from tests.verl import ppo

if parse(verl.__version__) >= parse("0.9"):
    pytest.skip("verl 0.9 has a registry of vendors (test_registry.py)", allow_module_level=True)

HAS_WORKERS = find_spec("verl.workers.megatron_workers") is not None
ENGINES = {"language_model": "LanguageModelEngine", "value_model": "ValueModelEngine"}
STOCK = {"language_model": "MegatronEngineWithLMHead", "value_model": "MegatronEngineWithValueHead"}

pytestmark = pytest.mark.full


@pytest.fixture
def in_new_process(tmp_path: Path) -> Callable[[Callable[[], None]], None]:
    def run(work: Callable[[], None]) -> None:
        def in_process(rank: int) -> None:
            for name in [n for n in sys.modules if n.partition(".")[0] == "verl" or "integrations.verl" in n]:
                del sys.modules[name]
            # As on a machine with CUDA, whose engines are asked for.
            from verl.utils import device

            device.is_cuda_available = True
            work()

        log = tmp_path / "log"
        assert forked_ranks.run(1, in_process, log) == [0], log.read_text()

    return run


def engines() -> dict[str, str]:
    from verl.workers.engine import EngineRegistry

    return {model: EngineRegistry.get_engine_cls(model, "megatron").__name__ for model in STOCK}


def workers_manager() -> str | None:
    if not HAS_WORKERS:
        return None
    from verl.workers import megatron_workers

    return megatron_workers.MegatronCheckpointManager.__name__


def checkpoint_options(*overrides: str) -> Any:
    """Of the critic, as the trainer's driver makes them (`RayPPOTrainer.init_workers`)."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(ppo.configuration(Path("root"), Path("model"), overrides).critic.checkpoint)


def test_nothing_is_asked(in_new_process: Callable[[Callable[[], None]], None]) -> None:
    def work() -> None:
        checkpoint_options()
        assert engines() == STOCK
        assert workers_manager() in (None, "MegatronCheckpointManager")

    in_new_process(work)


def test_by_the_options(in_new_process: Callable[[Callable[[], None]], None]) -> None:
    def work() -> None:
        from verl.trainer.config import CheckpointConfig

        options = checkpoint_options(*ppo.OURS, "+critic.checkpoint.timeout_s=60", "critic.checkpoint.async_save=True")
        assert isinstance(options, CheckpointConfig)
        assert (options.async_save, options.timeout_s) == (True, 60)
        assert options.get("save_contents") == ["model", "optimizer", "extra"]
        assert engines() == ENGINES
        assert workers_manager() == ("WorkerCheckpointManager" if HAS_WORKERS else None)

    in_new_process(work)


def test_by_options_from_the_driver(in_new_process: Callable[[Callable[[], None]], None], tmp_path: Path) -> None:
    """A critic's worker gets them pickled, and may have imported nothing of verl's workers before."""

    def driver() -> None:
        (tmp_path / "options.pickle").write_bytes(pickle.dumps(checkpoint_options(*ppo.OURS)))

    def worker() -> None:
        pickle.loads((tmp_path / "options.pickle").read_bytes())
        assert engines() == ENGINES
        assert workers_manager() == ("WorkerCheckpointManager" if HAS_WORKERS else None)

    in_new_process(driver)
    in_new_process(worker)


def test_by_external_lib(in_new_process: Callable[[Callable[[], None]], None]) -> None:
    """As the workers of verl 0.4 to 0.7 import it. 0.8 does not for a critic, so there it is refused."""

    def work() -> None:
        from verl.utils.import_utils import import_external_libs

        if HAS_WORKERS:
            import_external_libs("mcore_ckpt.integrations.verl.workers")
            assert workers_manager() == "WorkerCheckpointManager"
        else:
            with pytest.raises(ImportError, match=r"verl 0.8.0 has no megatron workers.*checkpoint._target_="):
                import_external_libs("mcore_ckpt.integrations.verl.workers")

    in_new_process(work)
