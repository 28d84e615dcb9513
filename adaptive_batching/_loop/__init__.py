"""An optimizer step for a plain PyTorch loop: probed, cut and recovered, without any recipe."""
