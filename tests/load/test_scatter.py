"""How many bytes a rank says that it has read."""

from pathlib import Path

import torch

from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.load.fill import TensorFill
from mcore_ckpt.load.scatter import Request, scatter
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.tiny_models import make_hf_folder


def test_rank_0_counts_what_it_reads_for_itself(tmp_path: Path) -> None:
    reader = HuggingFaceReader(read_contents(make_hf_folder(tmp_path / "hf", "qwen3")))
    key = ShardKey("decoder.final_layernorm.weight", MODEL)
    info = reader.info(key)
    assert info is not None
    region, target = Region.whole(info.shape), torch.full(info.shape, torch.nan)
    found = Locator(reader, None).find(Wanted(key, region, "hf"))
    assert found is not None
    fill = TensorFill(found.reads, found.dtype, lambda: target)
    assert scatter(reader, [Request(key.name, region, fill)], 0, 1) >= target.nbytes
    assert not target.isnan().any()
