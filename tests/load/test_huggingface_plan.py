"""What is checked after a HuggingFace folder has filled a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.load.huggingface_plan import refuse_nan


@pytest.mark.parametrize("number", range(3))
def test_nan_in_any_tensor_is_refused(number: int) -> None:
    tensors = [torch.ones(2, 3), torch.ones(4), torch.ones(1)]
    requests = [
        SimpleNamespace(name=f"tensor_{at}", fill=SimpleNamespace(encode=None, target=lambda tensor=tensor: tensor))
        for at, tensor in enumerate(tensors)
    ]
    plan: Any = SimpleNamespace(requests=requests, reader=SimpleNamespace(place="hf"))
    refuse_nan(plan)
    tensors[number][-1] = torch.nan
    with pytest.raises(CheckpointCorruptError, match=rf"^hf: tensor tensor_{number}: contains NaN"):
        refuse_nan(plan)
