"""slime's set-up of a rank, from where its tests have not done it already."""

from megatron.training.global_vars import set_args

from slime.utils.misc import load_function


def init(args):
    set_args(args)
    # slime: process groups, seeds and the tokenizer.
    if getattr(args, "custom_megatron_init_path", None):
        load_function(args.custom_megatron_init_path)(args)
