"""Habits of scripts that others wrote: losses, steps, collators, data and models, each as a trainer to be made.

Most are a ``compute_loss`` that forums, papers' repositories or examples have. ``HABITS`` says of each what it comes to
with parts of a batch: the training of the whole batch, or a refusal.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import Trainer

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.conftest import without_pages
from tests.transformers import trainers
from tests.transformers.trainers import Features

IGNORED = -100
SAME = ""
"""Parts of a batch train as the whole batch does."""

Make = Callable[[Path, AdaptiveArguments | None], Any]
"""(folder, our settings or None) -> a trainer, with a model of its own."""


@dataclass(frozen=True)
class Habit:
    """What a stranger's script makes, and what becomes of it."""

    make: Callable[..., Any]
    """(folder, our settings or None, **settings) -> a trainer with a model of its own."""

    outcome: str = SAME
    """``SAME``, or a regular expression that finds the refusal."""

    draws: bool = False
    """True if each part draws random numbers: the reference is Trainer's accumulation over two batches of 4."""

    @property
    def size(self) -> int:
        """Samples of a part, of the 8 of a step."""
        return 4 if self.draws else 3


# --- models


def llama(**settings: Any) -> Any:
    return trainers.make_llama(**settings)


def classes(**settings: Any) -> Any:
    """A classifier without dropout, unless settings have some; its loss takes no ``num_items_in_batch``."""
    torch.manual_seed(0)
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **settings}
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **trainers.SIZES, **drop))


def with_batch_norm() -> Any:
    """A classifier as ``from_pretrained`` returns it: in evaluation mode, up to the first step."""
    model = classes()
    model.dropout = nn.BatchNorm1d(32)
    return model.eval()


class Codebook(nn.Module):
    """Vectors that follow what is nearest to them, by a moving average in forward, as in VQ-VAE."""

    vectors: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(4, size, generator=torch.Generator().manual_seed(3)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [b, c]
        nearest = torch.cdist(hidden, self.vectors).argmin(1)
        found = self.vectors[nearest]
        if self.training:
            with torch.no_grad():
                for index in nearest.unique().tolist():
                    self.vectors[index].lerp_(hidden[nearest == index].mean(0), 0.1)
        return hidden + (found - hidden).detach() * 0.5


def with_codebook() -> Any:
    model = classes()
    model.dropout = Codebook(32)
    return model


class Centred(nn.Module):
    """Subtracts an average over all batches so far, an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = hidden.detach().mean(0)
        self.mean = found if self.mean is None else torch.lerp(self.mean, found, 0.3)
        return hidden - self.mean


def with_attribute() -> Any:
    model = classes()
    model.dropout = Centred()
    return model


def dynamic_rope() -> Any:
    """Rotary frequencies that follow the longest sequence so far: longer than the model was made for."""
    return llama(
        max_position_embeddings=16, initializer_range=0.3,
        rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
    )  # fmt: skip


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def on_two_devices() -> Any:
    """A model as ``from_pretrained(device_map="auto")`` spreads it over GPUs."""
    model = llama()
    model.hf_device_map = {"model": 0, "lm_head": 1}
    return model


def frozen() -> Any:
    model = llama()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad = False
    return model


def with_lora() -> Any:
    import peft

    importlib.import_module("peft.tuners.lora.torchao").is_torchao_available = lambda: False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(llama(), settings)


def experts() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            num_key_value_heads=2, pad_token_id=0, num_local_experts=4, num_experts_per_tok=2, **trainers.SIZES
        )
    )


def bert(**settings: Any) -> Any:
    return trainers.make_bert(**settings)


def stepping_in_backward() -> Any:
    """A model whose weights are stepped where their gradients arrive, which are gone afterwards, as with LOMO."""
    model = llama()

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return model


def clamping() -> Any:
    """A model that clamps each gradient that arrives, whatever it is a part of."""
    model = llama()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model


def spectral() -> Any:
    model = classes()
    model.classifier = nn.utils.parametrizations.spectral_norm(model.classifier)
    return model


class LastOfAll(nn.Module):
    """Reads a row to its end, with what it is padded by."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(128, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> dict[str, Any]:
        logits = self.head(self.lstm(self.embed(input_ids))[0][:, -1])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def recurrent() -> Any:
    torch.manual_seed(0)
    return LastOfAll()


# --- trainers

SETTINGS = {"num_train_epochs": 1, "learning_rate": 0.05, "optim": "sgd", "warmup_steps": 0, "max_grad_norm": 1e9}
NUM_SAMPLES = 24


def making(model: Callable[[], Any] = llama, **given: Any) -> Callable[..., Any]:
    """Return a function that makes a trainer of ``model()``; ``data`` is a function, too."""

    def make(folder: Path, ours: AdaptiveArguments | None, **settings: Any) -> Any:
        data = settings.pop("data", None) or given.get("data", lambda: trainers.make_data(NUM_SAMPLES))()
        made = {**SETTINGS, **given, "data": data, **settings}
        return trainers.make_trainer(folder, ours, model=model(), **made)

    return make


LossOf = Callable[[Any, Any, Features], Any]
"""(trainer, model, inputs) -> loss."""


def computing(loss: LossOf, model: Callable[[], Any] = llama, kind: Any = Trainer, **given: Any) -> Callable[..., Any]:
    """As ``making``, with a ``compute_loss`` of one's own."""

    class ComputingTrainer(kind):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Features, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            found = loss(self, model, inputs)
            return (found, {}) if return_outputs else found

    return making(model, kind=ComputingTrainer, **given)


class AveragingTrainer(Trainer):  # type: ignore[misc]
    """Averages accumulated batches, as the documentation tells those who compute a loss of their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


def of_classes(loss: LossOf, model: Callable[[], Any] = classes, **given: Any) -> Callable[..., Any]:
    return computing(loss, model, **{"collator": trainers.collate_classes, **given})


# --- losses over tokens: of logits [b, s, v] and labels [b, s]


def shifted(model: Any, inputs: Features, labels: str = "labels") -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [n, v] and labels [n] of all tokens that are followed by one."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return logits[:, :-1].flatten(0, 1), inputs[labels][:, 1:].flatten()


def of_tokens(model: Any, inputs: Features, **options: Any) -> torch.Tensor:
    """Return the loss of each token: zero where there is no target; [n]."""
    return F.cross_entropy(*shifted(model, inputs), ignore_index=IGNORED, reduction="none", **options)


def mean_of_tokens(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    return F.cross_entropy(*shifted(model, inputs))


def other_name(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    return F.cross_entropy(*shifted(model, inputs, "targets"))


def collate_targets(samples: list[Features]) -> Features:
    batch = trainers.collate(samples)
    batch["targets"] = batch.pop("labels")
    return batch


def padding_left(samples: list[Features]) -> Features:
    """The first token of a sample is a target where padding is before it, and is not where nothing is."""
    turned = trainers.collate([{key: row[::-1] for key, row in sample.items()} for sample in samples])
    return {key: value.flip(1) for key, value in turned.items()}


def after_prompts() -> list[Features]:
    data = trainers.make_data(NUM_SAMPLES)
    return [{**sample, "labels": [IGNORED, *sample["labels"][1:]]} for sample in data]


def masking_pairs(samples: list[Features]) -> Features:
    """A mask that is added to attention: [b, 1, s, s]."""
    batch = trainers.collate(samples)
    is_real = batch["attention_mask"].bool()[:, None, None]
    sees = torch.ones(is_real.shape[-1], is_real.shape[-1], dtype=torch.bool).tril() & is_real
    return {**batch, "attention_mask": torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)}


def class_weights_of_tokens(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    return F.cross_entropy(*shifted(model, inputs), weight=torch.linspace(0.2, 3, trainers.VOCABULARY))


def label_smoothing(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    logits, labels = shifted(model, inputs)
    chances, is_target = logits.log_softmax(-1), labels != IGNORED
    found = -0.9 * chances.gather(1, labels.clamp(min=0)[:, None])[:, 0] - 0.1 * chances.mean(-1)
    return (found * is_target).sum() / is_target.sum()


def focal(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    losses = of_tokens(model, inputs)
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / (inputs["labels"][:, 1:] != IGNORED).sum()


def token_weights_of_targets(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Weights of tokens, and a mean over their number."""
    losses, labels = of_tokens(model, inputs), inputs["labels"][:, 1:].flatten()
    return (losses * (1 + labels % 3)).sum() / (labels != IGNORED).sum()


def token_weights_of_weights(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Weights of tokens, and a mean over these."""
    losses, labels = of_tokens(model, inputs), inputs["labels"][:, 1:].flatten()
    weights = torch.where(labels == IGNORED, 0, 0.1 + labels % 5)
    return (losses * weights).sum() / weights.sum()


def last_token(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    last, rows = inputs["attention_mask"].sum(1) - 1, torch.arange(len(logits))
    return F.cross_entropy(logits[rows, last - 1], inputs["input_ids"][rows, last])


def mean_of_padded(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """A mean over all places, those of padding included, as in scripts that forget to mask."""
    return of_tokens(model, inputs).mean()


def mean_of_means(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Each sample's mean over its tokens, and the mean of these."""
    is_target = inputs["labels"][:, 1:] != IGNORED
    losses = of_tokens(model, inputs).view_as(is_target)
    return (losses.sum(1) / is_target.sum(1)).mean()


def decay(model: Any) -> torch.Tensor:
    return 1e-2 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def decayed_mean(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    return mean_of_tokens(trainer, model, inputs) + decay(model)


class DecayedTrainer(Trainer):  # type: ignore[misc]
    """Adds a term of the weights to what Trainer divides by the targets of all parts."""

    def compute_loss(self, model: Any, inputs: Features, return_outputs: bool = False, **rest: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **rest)
        loss = loss + decay(model)
        return (loss, outputs) if return_outputs else loss


def two_means(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """A mean over tokens and one over samples."""
    outputs = model(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True
    )  # fmt: skip
    of_text = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    mask = inputs["attention_mask"][..., None]
    pooled = (outputs.hidden_states[-1] * mask).sum(1) / mask.sum(1)
    return of_text + (pooled.square().mean(1) - inputs["attention_mask"].sum(1) / 24).square().mean()


class DistillingTrainer(Trainer):  # type: ignore[misc]
    """Has its teacher in an attribute, and a mean over targets of how far the student is from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(7)
        self.teacher = transformers.LlamaForCausalLM(self.model.config)

    over_padding = False

    def compute_loss(self, model: Any, inputs: Features, return_outputs: bool = False, **rest: Any) -> Any:
        self.teacher.eval()
        student, labels = shifted(model, inputs)
        with torch.no_grad():
            teacher, _ = shifted(self.teacher, inputs)
        of = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        is_target = torch.ones_like(labels) if self.over_padding else labels != IGNORED
        loss = F.cross_entropy(student, labels) + (of * is_target).sum() / is_target.sum()
        return (loss, {}) if return_outputs else loss


class PaddedDistillingTrainer(DistillingTrainer):
    over_padding = True  # reduction="batchmean" of all tokens


class BalancingTrainer(Trainer):  # type: ignore[misc]
    """Adds the loss that balances experts by hand, with ``output_router_logits`` off in the config."""

    def compute_loss(self, model: Any, inputs: Features, return_outputs: bool = False, **rest: Any) -> Any:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        outputs = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_router_logits=True
        )  # fmt: skip
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        loss = loss + 0.02 * load_balancing_loss_func(outputs.router_logits, 4, 2, inputs["attention_mask"])
        return (loss, outputs) if return_outputs else loss


# --- losses over samples: of logits [b, c] and labels [b]


def logits_of(model: Any, inputs: Features) -> torch.Tensor:
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits  # type: ignore[no-any-return]


def class_weights(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """The forum's class-weighted loss, a mean over weights."""
    return F.cross_entropy(logits_of(model, inputs), inputs["labels"], weight=torch.tensor([0.2, 1.0, 5.0]))


def focal_of_classes(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    losses = F.cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def sample_weights(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    losses = F.cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return (losses * inputs["weights"]).mean()


def sample_weights_of_weights(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    losses = F.cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return (losses * inputs["weights"]).sum() / inputs["weights"].sum()


def collate_weights(samples: list[Features]) -> Features:
    weights = torch.tensor([0.1 + sample["input_ids"][-1] % 7 for sample in samples])
    return {**trainers.collate_classes(samples), "weights": weights}


def contrastive(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Each sample's first logits against those of all others in the batch, as in SimCSE and CLIP."""
    found = F.normalize(logits_of(model, inputs), dim=1)
    near = F.normalize(found + 0.1 * found.roll(1, 1), dim=1)
    return F.cross_entropy(found @ near.T / 0.05, torch.arange(len(found)))


def r_drop(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Two forwards whose dropout differs, and how far they are apart."""
    one, other = logits_of(model, inputs), logits_of(model, inputs)
    apart = F.kl_div(one.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="batchmean")
    return F.cross_entropy(one, inputs["labels"]) + F.cross_entropy(other, inputs["labels"]) + apart


def mixup(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(inputs["labels"]))
    words = model.get_input_embeddings()(inputs["input_ids"])
    mixed = share * words + (1 - share) * words[order]
    logits = model(inputs_embeds=mixed, attention_mask=torch.ones_like(inputs["attention_mask"])).logits
    labels = inputs["labels"]
    return share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[order])


class CentersTrainer(Trainer):  # type: ignore[misc]
    """Center loss: each class has a centre, which follows its samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.centers = torch.zeros(3, 3)

    def compute_loss(self, model: Any, inputs: Features, return_outputs: bool = False, **rest: Any) -> Any:
        logits, labels = logits_of(model, inputs), inputs["labels"]
        loss = F.cross_entropy(logits, labels) + (logits - self.centers[labels]).square().sum(1).mean()
        with torch.no_grad():
            for label in labels.unique().tolist():
                self.centers[label] += 0.5 * (logits[labels == label].mean(0) - self.centers[label])
        return (loss, {}) if return_outputs else loss


def gradient_penalty(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """How far the gradient of each sample's largest logit by its words is from one."""
    words = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=words, attention_mask=inputs["attention_mask"]).logits
    (slopes,) = torch.autograd.grad(logits.square().sum(), words, create_graph=True)
    return F.cross_entropy(logits, inputs["labels"]) + (slopes.flatten(1).norm(dim=1) - 1).square().mean()


def two_heads(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    logits = logits_of(model, inputs)
    return F.cross_entropy(logits, inputs["labels"]) + F.mse_loss(logits[:, 0], inputs["attention_mask"].sum(1) / 24)


def in_numbers(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """A loss that reads its own value on the host, as scripts do that print it or branch by it."""
    loss = F.cross_entropy(logits_of(model, inputs), inputs["labels"])
    return loss * 2 if loss.item() > 1e6 else loss


def entropy_of_batch(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Rewards batches that use all classes, by the entropy of their mean prediction."""
    logits = logits_of(model, inputs)
    mean = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, inputs["labels"]) + (mean * mean.log()).sum()


def hardest(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Only the harder half of a batch counts, as in online hard example mining."""
    losses = F.cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return losses.topk(max(len(losses) // 2, 1)).values.mean()


# --- steps


class OwnStepTrainer(Trainer):  # type: ignore[misc]
    """Calls its own loss and backward, and does not ask into how many parts a step is cut."""

    def training_step(self, model: Any, inputs: Features, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()  # type: ignore[no-any-return]


class TwiceTrainer(Trainer):  # type: ignore[misc]
    """Runs Trainer's step twice and adds up."""

    def training_step(self, model: Any, inputs: Features, *rest: Any) -> torch.Tensor:
        return super().training_step(model, dict(inputs), *rest) + super().training_step(model, dict(inputs), *rest)  # type: ignore[no-any-return]


class AdversarialTrainer(Trainer):  # type: ignore[misc]
    """FGM: a second step where embeddings have moved along the gradient of the first."""

    def training_step(self, model: Any, inputs: Features, *rest: Any) -> torch.Tensor:
        loss = super().training_step(model, dict(inputs), *rest)
        words = model.get_input_embeddings().weight
        kept = words.detach().clone()
        with torch.no_grad():
            words.add_(words.grad / words.grad.norm())
        super().training_step(model, dict(inputs), *rest)
        with torch.no_grad():
            words.copy_(kept)
        return loss  # type: ignore[no-any-return]


class ScaledStepTrainer(Trainer):  # type: ignore[misc]
    """Doubles the gradient after Trainer's step."""

    def training_step(self, model: Any, inputs: Features, *rest: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *rest)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return loss  # type: ignore[no-any-return]


class NoisyStepTrainer(Trainer):  # type: ignore[misc]
    """Adds noise to the gradient after Trainer's step."""

    def training_step(self, model: Any, inputs: Features, *rest: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *rest)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += 1e-3 * torch.randn_like(parameter)
        return loss  # type: ignore[no-any-return]


class TeacherTrainer(AveragingTrainer):
    """Keeps weights near an average of those before, which follows in each forward."""

    teacher: list[torch.Tensor] | None = None

    def compute_loss(self, model: Any, inputs: Features, return_outputs: bool = False, **rest: Any) -> Any:
        weights = list(model.parameters())
        if self.teacher is None:
            self.teacher = [weight.detach().clone() for weight in weights]
        for follower, weight in zip(self.teacher, weights, strict=True):
            follower.lerp_(weight.detach(), 0.01)
        apart = sum((weight - each).square().sum() for weight, each in zip(weights, self.teacher, strict=True))
        loss = F.cross_entropy(*shifted(model, inputs)) + 0.1 * apart
        return (loss, {}) if return_outputs else loss


class GroupsTrainer(Trainer):  # type: ignore[misc]
    """Has groups of its own in its optimizer."""

    optimizer: Any

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            head = [p for name, p in self.model.named_parameters() if "lm_head" in name]
            body = [p for name, p in self.model.named_parameters() if "lm_head" not in name]
            groups: list[dict[str, Any]] = [{"params": head, "lr": 0.2}, {"params": body}]
            self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
        return self.optimizer


class SummingTrainer(Trainer):  # type: ignore[misc]
    """Sums its loss in an attribute, and logs the mean of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sum, self.number = torch.tensor(0.0), 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self.sum, self.number = self.sum + (found[0] if isinstance(found, tuple) else found).detach(), self.number + 1
        return found

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        if self.number:
            logs["own"] = self.sum.item() / self.number
            self.sum, self.number = torch.tensor(0.0), 0
        super().log(logs, *rest)


class ListingTrainer(SummingTrainer):
    """Appends its loss to a list, which is None until the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[torch.Tensor] | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = Trainer.compute_loss(self, *args, **kwargs)
        self.losses = [] if self.losses is None else self.losses
        self.losses.append((found[0] if isinstance(found, tuple) else found).detach())
        return found

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        if self.losses:
            logs["own"] = torch.stack(self.losses).mean().item()
            self.losses = None
        Trainer.log(self, logs, *rest)


# --- collators and data


def popping(samples: list[Features]) -> Features:
    """Takes fields out of the samples, which then have none."""
    labels = [sample.pop("labels") for sample in samples]
    return trainers.collate([{**sample, "labels": each} for sample, each in zip(samples, labels, strict=True)])


def padding_in_place(samples: list[Features]) -> Features:
    """Makes the lists of the samples longer."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    for sample in samples:
        more = longest - len(sample["input_ids"])
        sample["attention_mask"] = [1] * len(sample["input_ids"]) + [0] * more
        sample["input_ids"] += [0] * more
        sample["labels"] += [IGNORED] * more
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


class Copied(list[Features]):
    """Hands out a copy of a sample, as data sets of Arrow do."""

    def __getitem__(self, index: Any) -> Any:
        return {key: list(value) for key, value in super().__getitem__(index).items()}


def masking(samples: list[Features]) -> Features:
    """Masks two words of each sample, drawn as ``DataCollatorForLanguageModeling`` draws."""
    batch = trainers.collate(samples)
    words, labels = batch["input_ids"], torch.full_like(batch["input_ids"], IGNORED)
    for row, sample in enumerate(samples):
        chosen = torch.randperm(len(sample["input_ids"]))[:2]
        labels[row, chosen], words[row, chosen] = words[row, chosen], 3
    return {**batch, "labels": labels}


class Drawing(list[Features]):
    """Draws random numbers in ``__getitem__``, as augmentation does."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        change = random.randrange(1, 90) + int(torch.randint(5, ())) + int(np.random.randint(5))
        return {**sample, "input_ids": [change % 96, *sample["input_ids"][1:]]}


def alike_at_first(change: Callable[[Features], Features]) -> Callable[[], list[Features]]:
    """Data whose first 32 samples are alike: ``change`` makes them so."""

    def data() -> list[Features]:
        found = trainers.make_data(48)
        return [*(change(sample) for sample in found[:32]), *found[32:]]

    return data


def one_length(sample: Features) -> Features:
    ids = [*sample["input_ids"] * 9][:10]
    return {"input_ids": ids, "labels": ids}


def one_class(sample: Features) -> Features:
    return {**sample, "input_ids": [3, *sample["input_ids"][1:]]}


def one_weight(sample: Features) -> Features:
    return {**sample, "input_ids": [*sample["input_ids"][:-1], 7]}


def of_one_length() -> list[Features]:
    found = trainers.make_data(NUM_SAMPLES)
    return [{"input_ids": [*each["input_ids"] * 9][:24], "labels": [*each["input_ids"] * 9][:24]} for each in found]


def without_targets(share: int) -> Callable[[], list[Features]]:
    """Data of which every sample but each ``share``-th has no target; none has one if it is 0."""

    def data() -> list[Features]:
        found = trainers.make_data(NUM_SAMPLES)
        for index, sample in enumerate(found):
            if not share or index % share:
                sample["labels"] = [IGNORED] * len(sample["labels"])
        return found

    return data


class Lengthy(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Has a length, and no items."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Any:
        return iter(trainers.make_data(NUM_SAMPLES))


class TemperatureTrainer(AveragingTrainer):
    """Learns a temperature, which is a parameter of the trainer and not of its model."""

    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(()))

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), self.temperature], lr=0.05)
        return self.optimizer


def by_temperature(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    logits, labels = shifted(model, inputs)
    return F.cross_entropy(logits / trainer.temperature, labels, ignore_index=IGNORED)


def balanced_by_gradients(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Two losses weighted by the norms of their gradients, over the batch, as GradNorm does."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    losses = F.cross_entropy(logits, inputs["labels"]), logits.square().mean()
    head = model.classifier.weight
    norms = [torch.autograd.grad(loss, head, retain_graph=True)[0].norm() for loss in losses]
    return losses[0] + losses[1] * (norms[0] / norms[1]).detach()


def of_eight(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """A loss for batches of 8 alone, as scripts with ``drop_last`` may have."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return F.cross_entropy(logits.view(8, -1), inputs["labels"])


class Thawing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Trains all layers after the first step, and keeps a moving average of the weights."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.requires_grad_(True)
        for name, weight in model.state_dict().items():
            self.average[name] = torch.lerp(self.average.get(name, weight.clone()), weight, 0.1)


# --- the habits

REFUSED = "."
"""Refused, in whatever words."""

HABITS: Mapping[str, Habit] = {
    "Llama": Habit(making()),
    "tied weights": Habit(making(tied)),
    "frozen layers": Habit(making(frozen)),
    "gradient checkpointing": Habit(making(gradient_checkpointing=True)),
    "a model on two devices": Habit(making(on_two_devices), "device_map"),
    "groups in the optimizer": Habit(making(kind=GroupsTrainer)),
    "LoRA with a head that is trained": Habit(making(with_lora)),
    "NEFTune": Habit(making(neftune_noise_alpha=5.0), draws=True),
    "dynamic rotary frequencies": Habit(making(dynamic_rope, data=of_one_length)),
    "dynamic rotary frequencies of unlike lengths": Habit(making(dynamic_rope), REFUSED),
    "batch norm": Habit(making(with_batch_norm, collator=trainers.collate_classes), "batch"),
    "a codebook that follows its input": Habit(making(with_codebook, collator=trainers.collate_classes), REFUSED),
    "an average in an attribute": Habit(making(with_attribute, collator=trainers.collate_classes), REFUSED),
    "mean of tokens": Habit(computing(mean_of_tokens)),
    "targets of another name": Habit(computing(other_name, collator=collate_targets, remove_unused_columns=False)),
    "targets of another name, one length at first": Habit(
        computing(other_name, collator=collate_targets, remove_unused_columns=False, data=alike_at_first(one_length)),
        REFUSED,
    ),
    "class weights, one class at first": Habit(of_classes(class_weights, data=alike_at_first(one_class)), REFUSED),
    "weights of samples, one weight at first": Habit(
        of_classes(sample_weights_of_weights, collator=collate_weights, data=alike_at_first(one_weight))
    ),
    "class weights": Habit(of_classes(class_weights), REFUSED),
    "class weights of tokens": Habit(computing(class_weights_of_tokens), REFUSED),
    "label smoothing by hand": Habit(computing(label_smoothing)),
    "focal loss": Habit(of_classes(focal_of_classes)),
    "focal loss of tokens": Habit(computing(focal)),
    "weights of tokens over their number": Habit(computing(token_weights_of_targets)),
    "weights of tokens over their sum": Habit(computing(token_weights_of_weights), REFUSED),
    "weights of samples over their number": Habit(of_classes(sample_weights, collator=collate_weights)),
    "weights of samples over their sum": Habit(of_classes(sample_weights_of_weights, collator=collate_weights)),
    "last token": Habit(computing(last_token)),
    "mean over padding": Habit(computing(mean_of_padded), REFUSED),
    "mean of means": Habit(computing(mean_of_means)),
    "L2 of weights and a mean": Habit(computing(decayed_mean)),
    "L2 of weights and Trainer's sum": Habit(making(kind=DecayedTrainer)),
    "two means over different numbers": Habit(computing(two_means), REFUSED),
    "two heads": Habit(of_classes(two_heads)),
    "distillation": Habit(making(kind=DistillingTrainer)),
    "distillation over padding": Habit(making(kind=PaddedDistillingTrainer), REFUSED),
    "experts balanced by hand": Habit(making(experts, kind=BalancingTrainer), REFUSED),
    "contrastive": Habit(of_classes(contrastive), REFUSED),
    "R-Drop": Habit(of_classes(r_drop, lambda: classes(hidden_dropout_prob=0.2), kind=AveragingTrainer), draws=True),
    "mixup": Habit(of_classes(mixup), REFUSED),
    "center loss": Habit(making(classes, kind=CentersTrainer, collator=trainers.collate_classes), REFUSED),
    "gradient penalty": Habit(of_classes(gradient_penalty, lambda: classes(attn_implementation="eager"))),
    "a loss that is read": Habit(of_classes(in_numbers)),
    "entropy of a batch": Habit(of_classes(entropy_of_batch), REFUSED),
    "the hardest half": Habit(of_classes(hardest), REFUSED),
    "a step of its own": Habit(making(kind=OwnStepTrainer), REFUSED),
    "a step of its own of classes": Habit(
        making(classes, kind=OwnStepTrainer, collator=trainers.collate_classes), REFUSED
    ),
    "two steps": Habit(making(kind=TwiceTrainer)),
    "two steps of classes": Habit(making(classes, kind=TwiceTrainer, collator=trainers.collate_classes)),
    "adversarial": Habit(making(classes, kind=AdversarialTrainer, collator=trainers.collate_classes), REFUSED),
    "gradient changed in a step": Habit(making(kind=ScaledStepTrainer), REFUSED),
    "noise in a gradient": Habit(making(kind=NoisyStepTrainer), REFUSED),
    "a teacher that follows": Habit(making(kind=TeacherTrainer), REFUSED),
    "a sum in an attribute": Habit(making(classes, kind=SummingTrainer, collator=trainers.collate_classes)),
    "a list in an attribute": Habit(making(classes, kind=ListingTrainer, collator=trainers.collate_classes)),
    "a collator that pops": Habit(making(collator=popping, data=lambda: Copied(trainers.make_data(NUM_SAMPLES)))),
    "a collator that pads in place": Habit(
        making(collator=padding_in_place, data=lambda: Copied(trainers.make_data(NUM_SAMPLES)))
    ),
    "padding on the left": Habit(making(collator=padding_left), "padding_side='right'"),
    "padding on the left, before prompts": Habit(making(collator=padding_left, data=after_prompts)),
    "a mask of four dimensions": Habit(making(collator=masking_pairs)),
    "a collator that draws": Habit(making(bert, kind=AveragingTrainer, collator=masking), draws=True),
    "data that draw": Habit(making(data=lambda: Drawing(trainers.make_data(NUM_SAMPLES)))),
    "every fifth sample has targets": Habit(making(data=without_targets(5))),
    "every fifth sample has targets, and a mean": Habit(making(bert, data=without_targets(5))),
    "no sample has targets": Habit(making(data=without_targets(0)), "target"),
    "no sample has targets, and a mean": Habit(making(bert, data=without_targets(0)), "target"),
    "data with a length and no items": Habit(making(data=Lengthy), "a length and no items"),
    "T5": Habit(making(trainers.make_t5)),
    "label_smoothing_factor": Habit(making(label_smoothing_factor=0.1)),
    "an optimizer in backward": Habit(making(stepping_in_backward), "register_post_accumulate_grad_hook"),
    "a parameter of the trainer": Habit(computing(by_temperature, kind=TemperatureTrainer)),
    "losses balanced by their gradients": Habit(of_classes(balanced_by_gradients, kind=AveragingTrainer), REFUSED),
    "a batch of eight": Habit(of_classes(of_eight, kind=AveragingTrainer), "runs 8 samples, and not one"),
    "gradients that are clamped": Habit(making(clamping), REFUSED),
    "spectral norm": Habit(making(spectral, collator=trainers.collate_classes), REFUSED),
    "an LSTM over padding": Habit(making(recurrent, collator=trainers.collate_classes), REFUSED),
    "layers that thaw, and an average of weights": Habit(making(frozen, callbacks=[Thawing()])),
}


# --- TRL's trainers


def of_trl(
    kind: str, rows: str = "pairs", reference: Callable[[], Any] | None = None, **config: Any
) -> Callable[..., Any]:
    """Return a function that makes a trainer of TRL, as ``DPO``, or of its experiments, as ``experimental.cpo.CPO``."""

    def make(folder: Path, ours: AdaptiveArguments | None, **settings: Any) -> Any:
        import datasets
        import trl

        from tests.transformers import test_trl

        path, _, name = kind.rpartition(".")
        module = importlib.import_module(f"trl.{path}") if path else trl
        made, config_class = getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
        given: dict[str, Any] = {"ref_model": reference()} if reference else {}
        if rows == "tokens":
            given["data_collator"] = with_prompts
            given["teacher_model"] = llama(initializer_range=0.1)
        if rows == "prompts":
            given["reward_funcs"] = lambda completions, **rest: [0.0] * len(completions)
        if ours is not None:
            made, given["adaptive"] = adaptive(made), ours
        settings = {**SETTINGS, "bf16": False, "gradient_checkpointing": False, **config, **settings}
        return made(
            model=llama(), args=trainers.arguments(folder, config_class, **settings),
            train_dataset=datasets.Dataset.from_list(ROWS[rows]()), processing_class=test_trl.make_tokenizer(), **given,
        )  # fmt: skip

    return make


def wide() -> Any:
    return llama(initializer_range=0.3)


def with_prompts(samples: list[Features]) -> Features:
    batch = trainers.collate(samples)
    return {**batch, "prompts": batch["input_ids"][:, :1], "prompt_attention_mask": batch["attention_mask"][:, :1]}


def words(chance: random.Random, most: int) -> str:
    return " ".join(f"w{chance.randrange(3, trainers.VOCABULARY)}" for _ in range(chance.randrange(2, most)))


def pairs() -> list[Features]:
    chance = random.Random(1)
    lengths = {"prompt": 8, "chosen": 16, "rejected": 16}
    return [{name: words(chance, most) for name, most in lengths.items()} for _ in range(NUM_SAMPLES)]


def rated() -> list[Features]:
    """Answers that are good or not: rows of KTO."""
    return [
        {"prompt": each["prompt"], "completion": each["chosen"], "label": index % 3 > 0}
        for index, each in enumerate(pairs())
    ]


ROWS: dict[str, Callable[[], list[Features]]] = {
    "pairs": pairs,
    "rated": rated,
    "triples": lambda: [{**each, "reference": each["chosen"]} for each in pairs()],
    "tokens": lambda: trainers.make_data(NUM_SAMPLES),
    "texts": lambda: [{"text": f"{each['prompt']} {each['chosen']}"} for each in pairs()],
    "answers": lambda: [{"prompt": each["prompt"], "completion": each["chosen"]} for each in pairs()],
    "prompts": lambda: [{"prompt": each["prompt"]} for each in pairs()],
}

OF_TRL: Mapping[str, Habit] = {
    "SFT": Habit(of_trl("SFT", "texts")),
    "SFT of answers": Habit(of_trl("SFT", "answers")),
    "DPO": Habit(of_trl("DPO", reference=llama)),
    "DPO with aot": Habit(of_trl("DPO", reference=llama, loss_type=["aot"], learning_rate=1.0), REFUSED),
    "DPO with aot and another reference": Habit(of_trl("DPO", reference=wide, loss_type=["aot"]), REFUSED),
    "DPO with aot_unpaired": Habit(
        of_trl("DPO", reference=llama, loss_type=["aot_unpaired"], learning_rate=1.0), REFUSED
    ),
    "DPO with bco_pair": Habit(of_trl("DPO", reference=llama, loss_type=["bco_pair"])),
    "DPO with a mean of tokens": Habit(
        of_trl("DPO", reference=llama, loss_type=["sigmoid", "sft"]), "loss_type='sft' of DPOTrainer .*leave it out"
    ),
    "KTO": Habit(of_trl("KTO", "rated", reference=llama, learning_rate=1.0), REFUSED),
    "KTO with another reference": Habit(of_trl("KTO", "rated", reference=wide, beta=1.0), REFUSED),
    "KTO without KL": Habit(of_trl("KTO", "rated", reference=llama, loss_type="apo_zero_unpaired")),
    "CPO": Habit(of_trl("experimental.cpo.CPO"), "cpo_alpha=1.0 of CPOTrainer .*set it to 0"),
    "CPO without a mean of tokens": Habit(of_trl("experimental.cpo.CPO", loss_type="simpo", cpo_alpha=0.0)),
    "TPO": Habit(of_trl("experimental.tpo.TPO", "triples"), "tpo_alpha=1.0 of TPOTrainer .*set it to 0"),
    "TPO without a mean of tokens": Habit(of_trl("experimental.tpo.TPO", "triples", loss_type="ipo", tpo_alpha=0.0)),
    "ORPO": Habit(of_trl("experimental.orpo.ORPO"), "cross entropy of ORPOTrainer"),
    "GKD": Habit(of_trl("experimental.gkd.GKD", "tokens", lmbda=0.0), draws=True),
    "OnlineDPO": Habit(
        of_trl("experimental.online_dpo.OnlineDPO", "prompts", reference=llama, max_new_tokens=4, max_length=64),
        "while training|generat",
    ),
    "GKD that generates": Habit(of_trl("experimental.gkd.GKD", "tokens", lmbda=1.0, max_new_tokens=4), "set lmbda=0"),
}
"""Habits that need TRL."""


# --- two devices


def summed(trainer: Any, model: Any, inputs: Features) -> tuple[torch.Tensor, torch.Tensor]:
    losses, labels = of_tokens(model, inputs), inputs["labels"][:, 1:]
    return losses.sum(), (labels != IGNORED).sum()


def with_reduce(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """A mean over the tokens of all devices, whose gradients DDP averages."""
    loss, number = summed(trainer, model, inputs)
    return loss / trainer.accelerator.reduce(number, "sum") * trainer.accelerator.num_processes


def with_gather(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    loss, number = summed(trainer, model, inputs)
    return loss / trainer.accelerator.gather(number).sum() * trainer.accelerator.num_processes


def with_all_reduce(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    loss, number = summed(trainer, model, inputs)
    dist.all_reduce(number)
    return loss / number * dist.get_world_size()


ON_TWO_RANKS: Mapping[str, Habit] = {
    "BERT": Habit(making(bert)),
    "classes": Habit(making(classes, collator=trainers.collate_classes)),
    "reduce": Habit(computing(with_reduce), REFUSED),
    "gather": Habit(computing(with_gather), REFUSED),
    "all_reduce": Habit(computing(with_all_reduce), REFUSED),
}
"""Habits of scripts that torchrun starts; those that might wait for each other last."""


def outcome_on_rank(make: Callable[..., Any], folder: Path, ours: AdaptiveArguments | None) -> dict[str, Any]:
    torch.manual_seed(11)
    data = trainers.make_data(2 * NUM_SAMPLES)
    try:
        trainer = make(folder, ours, data=data, ddp_backend="gloo", ddp_timeout=30)
        trainer.train()
    except ConfigError as error:
        return {"refusal": str(error)}
    values = [value.detach().double() for value in trainer.model.state_dict().values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    return {
        "logged": trainers.logged(trainer), "weights": torch.cat([value.flatten() for value in values]).tolist(),
        "digest": digest,
    }  # fmt: skip


def run_on_rank(folder: Path) -> dict[str, dict[str, Any]]:
    """Train those of ``ON_TWO_RANKS`` with DDP, as ours and stock's, and return what became of them."""
    settings = {"ours": AdaptiveArguments(micro_batch_size=3), "stock": None}
    with without_pages():
        return {
            name: {kind: outcome_on_rank(habit.make, folder, ours) for kind, ours in settings.items()}
            for name, habit in ON_TWO_RANKS.items()
        }
