"""One checkpoint on disk: file names, manifest, index, `.pt` files, and finding damage in them."""
