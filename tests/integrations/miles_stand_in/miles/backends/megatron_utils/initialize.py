"""miles' set-up of a rank, from where its tests have not done it already."""

from megatron.training.global_vars import set_args

from miles.utils.misc import load_function


def init(args, indep_dp_store_addr=None, indep_dp_info=None):
    set_args(args)
    # miles: process groups, seeds and the tokenizer.
    if getattr(args, "custom_megatron_init_path", None):
        load_function(args.custom_megatron_init_path)(args)
