"""What a plain PyTorch loop uses: an optimizer step that is probed, cut and recovered, without any recipe."""
