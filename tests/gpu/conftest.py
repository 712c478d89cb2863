import pytest
import torch

from mcore_ckpt.io import _native

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if not _native.built_with_cuda:
        pytest.skip("mcore_ckpt was built without CUDA")
