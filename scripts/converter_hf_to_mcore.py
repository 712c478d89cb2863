"""`mcore-ckpt convert` under the name and with the options that users of verl type."""

import sys

from mcore_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
