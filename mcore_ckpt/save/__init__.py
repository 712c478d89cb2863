"""One save: plan, capture into host memory, write, commit, in the background if asked; and its HuggingFace export."""
