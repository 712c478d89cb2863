"""`mcore-ckpt convert` under the name, with the options and the result that users of verl expect.

It writes Megatron's dist checkpoint into --output_path, unless it is called with `--format native`.

python scripts/converter_hf_to_mcore.py --hf_model_path Qwen/Qwen1.5-MoE-A2.7B-Chat --output_path dist_checkpoint
"""

import sys

from mcore_ckpt.cli.main import main

if __name__ == "__main__":
    # Of two options the last one counts.
    sys.exit(main(["convert", "--format", "torch_dist", *sys.argv[1:]]))
