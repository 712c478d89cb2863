"""What NeMo-RL's sources say, as it was recorded, is what ours goes by, and the stand-in."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.nemo_rl import driver
from tests.integrations.source_facts import Facts, signature_in

REPOSITORY = Path(__file__).parents[2]
STAND_IN = REPOSITORY / "tests" / "bridge" / "nemo_rl_stand_in"
OURS = REPOSITORY / "mcore_ckpt" / "integrations" / "nemo_rl"


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts.of("nemo_rl")


def test_the_stand_in_is_called_as_nemo_rl_is(facts: Facts) -> None:
    for name in facts.functions:
        path, qualname = name.split(":")
        assert signature_in((STAND_IN / path).read_text(), qualname) == facts.signature(name), name


def test_a_replaced_function_takes_what_nemo_rl_passes() -> None:
    """The calls are those of the stand-in, whose functions are called as NeMo-RL's are."""
    calls = [node for path in STAND_IN.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    for name in ("save_checkpoint", "load_checkpoint", "maybe_finalize_async_save"):
        taken = signature_in((OURS / "functions.py").read_text(), f"BridgeFunctions.{name}")
        passed = {
            keyword.arg
            for node in calls
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
            for keyword in node.keywords
        }
        assert passed
        assert passed <= set(taken.strip("()").replace("=", ", ").split(", ")), name


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_IN)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("stand_in")
def test_the_driver_takes_our_worker_for_megatron_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, get_actor_python_env
    from nemo_rl.models.policy.lm_policy import Policy

    chosen = []
    monkeypatch.setattr(Policy, "__init__", lambda self, *args, **more: chosen.append(more))
    driver.register()
    driver.choose_worker()
    assert get_actor_python_env(driver.WORKER) == ACTOR_ENVIRONMENT_REGISTRY[driver.STOCK_WORKER]
    megatron = {"megatron_cfg": {"enabled": True}}
    Policy(None, megatron, None)
    Policy(None, megatron, None, worker_extension_cls_fqn="a.worker.of.mine")
    Policy(None, {"dtensor_cfg": {"enabled": True}}, None, init_optimizer=False)
    assert chosen == [
        {"worker_extension_cls_fqn": driver.WORKER},
        {"worker_extension_cls_fqn": "a.worker.of.mine"},
        {"init_optimizer": False},
    ]
    with pytest.raises(UnsupportedError, match=r"needs the worker nemo_rl\.modelopt\.QuantizedWorker"):
        Policy(None, megatron | {"quant_cfg": SimpleNamespace()}, None)


def test_without_nemo_rl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl.distributed.ray_actor_environment_registry", None)
    with pytest.raises(ImportError, match=r"mcore_ckpt\.integrations\.nemo_rl needs NeMo-RL"):
        driver.register()
