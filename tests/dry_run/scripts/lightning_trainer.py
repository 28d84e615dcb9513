"""Train a LightningModule with the Trainer of Lightning."""

import lightning
import torch
from llama import CONFIG, LENGTH, on_device
from torch.utils.data import DataLoader, TensorDataset


class Language(lightning.LightningModule):
    """A language model and its optimizer."""

    def configure_model(self) -> None:
        self.model = on_device(torch.float32)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        (tokens,) = batch
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def main() -> None:
    tokens = torch.randint(CONFIG.vocab_size, (64, LENGTH))
    trainer = lightning.Trainer(
        max_steps=3, precision="bf16-mixed", gradient_clip_val=1.0, accelerator="gpu", devices=1, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    module = Language()
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=2, num_workers=2))


if __name__ == "__main__":
    main()
