"""Parameters whose memory was freed are found in the host copy of their buffer."""

import torch

from mcore_ckpt.state.offloaded import HostCopy, in_host_memory


def test_a_tensor_is_found_by_its_place_in_the_buffer() -> None:
    """The buffer begins in the middle of its storage, and its copy in the middle of another."""
    storage = torch.arange(20.0)
    tensor = storage[6:12].view(2, 3).t()
    wanted, other = tensor.clone(), torch.ones(2)
    around = torch.full((7,), -1.0)
    copy = HostCopy(torch.cat([around, storage[4:16], around])[7:19], 4)
    storage.untyped_storage().resize_(0)
    found, same = in_host_memory([tensor, other], {storage.untyped_storage()._cdata: copy})
    assert torch.equal(found, wanted)
    assert same is other
