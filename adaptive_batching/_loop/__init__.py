"""An optimizer step for a plain PyTorch loop: probed, split and recovered, without any recipe."""
