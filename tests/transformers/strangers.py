"""Habits of scripts that others wrote: losses, steps, collators, data and models, each as a trainer to be made.

Most are a ``compute_loss`` that forums, papers' repositories or examples have. ``HABITS`` says of each what it comes to
with parts of a batch: the training of the whole batch, or a refusal.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import Trainer

from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers import trainers
from tests.transformers.trainers import Features

IGNORED = -100
SAME = ""
"""Parts of a batch train as the whole batch does."""


@dataclass(frozen=True)
class Habit:
    """What a stranger's script makes, and what becomes of it."""

    make: Callable[..., Any]
    """(folder, our settings or None, **settings) -> a trainer with a model of its own."""

    outcome: str = SAME
    """``SAME``, or a regular expression that finds the refusal."""

    draws: bool = False
    """True if each part draws random numbers: the reference is Trainer's accumulation over two batches of 4."""

    leaves: str = ""
    """What is not declared and stays changed by checks, if anything."""

    @property
    def size(self) -> int:
        """Samples of a part, of the 8 of a step."""
        return 4 if self.draws else 3


# --- models


def llama(**settings: Any) -> Any:
    return trainers.make_llama(**settings)


def classes(**settings: Any) -> Any:
    """A classifier whose loss takes no ``num_items_in_batch``."""
    return trainers.make_bert("BertForSequenceClassification", **settings)


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


def frozen() -> Any:
    model = llama()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad = False
    return model


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


OF_CLASSES: dict[str, Any] = {"collator": trainers.collate_classes}


def classifying(model: Callable[[], Any] = classes, **given: Any) -> Callable[..., Any]:
    return making(model, **OF_CLASSES, **given)


# --- losses over tokens: of logits [n, v] and labels [n] of all tokens that are followed by one


def shifted(model: Any, inputs: Features, labels: str = "labels") -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits  # [b, s, v]
    return logits[:, :-1].flatten(0, 1), inputs[labels][:, 1:].flatten()


def of_tokens(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, labels: str = "labels", **given: Any
) -> Callable[..., Any]:
    return computing(lambda trainer, model, inputs: loss(*shifted(model, inputs, labels)), **given)


each_token = partial(F.cross_entropy, reduction="none")
"""(logits, labels) -> the loss of each token, zero where there is no target; [n]."""


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


def class_weights_of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, weight=torch.linspace(0.2, 3, trainers.VOCABULARY))


def label_smoothing(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chances, is_target = logits.log_softmax(-1), labels != IGNORED
    found = -0.9 * chances.gather(1, labels.clamp(min=0)[:, None])[:, 0] - 0.1 * chances.mean(-1)
    return (found * is_target).sum() / is_target.sum()


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = each_token(logits, labels)
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / (labels != IGNORED).sum()


def token_weights_of_targets(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights of tokens, and a mean over their number."""
    return (each_token(logits, labels) * (1 + labels % 3)).sum() / (labels != IGNORED).sum()


def token_weights_of_weights(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights of tokens, and a mean over these."""
    weights = torch.where(labels == IGNORED, 0, 0.1 + labels % 5)
    return (each_token(logits, labels) * weights).sum() / weights.sum()


def weighted_sum(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over targets, of which each counts by its id, for ``compute_loss_func``."""
    labels = labels[:, 1:].flatten()
    losses = each_token(outputs.logits[:, :-1].flatten(0, 1), labels)
    return (losses * labels).sum() / (1 if num_items_in_batch is None else num_items_in_batch)


def last_token(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    logits, last, rows = (
        logits_of(model, inputs),
        inputs["attention_mask"].sum(1) - 1,
        torch.arange(len(inputs["labels"])),
    )
    return F.cross_entropy(logits[rows, last - 1], inputs["input_ids"][rows, last])


def mean_of_padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over all places, those of padding included, as in scripts that forget to mask."""
    return each_token(logits, labels).mean()


def mean_of_means(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Each sample's mean over its tokens, and the mean of these."""
    is_target = inputs["labels"][:, 1:] != IGNORED
    losses = each_token(*shifted(model, inputs)).view_as(is_target)
    return (losses.sum(1) / is_target.sum(1)).mean()


def decay(model: Any) -> torch.Tensor:
    return 1e-2 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def decayed_mean(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    return F.cross_entropy(*shifted(model, inputs)) + decay(model)


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

    over_padding = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(7)
        self.teacher = transformers.LlamaForCausalLM(self.model.config).eval()

    def compute_loss(self, model: Any, inputs: Features, return_outputs: bool = False, **rest: Any) -> Any:
        student, labels = shifted(model, inputs)
        with torch.no_grad():
            teacher, _ = shifted(self.teacher, inputs)
        off = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        is_target = torch.ones_like(labels) if self.over_padding else labels != IGNORED
        loss = F.cross_entropy(student, labels) + (off * is_target).sum() / is_target.sum()
        return (loss, {}) if return_outputs else loss


class PaddedDistillingTrainer(DistillingTrainer):
    over_padding = True  # reduction="batchmean" of all tokens


def balanced_by_hand(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Adds the loss that balances experts by hand, with ``output_router_logits`` off in the config."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    mask = inputs["attention_mask"]
    outputs = model(input_ids=inputs["input_ids"], attention_mask=mask, output_router_logits=True)
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    return loss + 0.02 * load_balancing_loss_func(outputs.router_logits, 4, 2, mask)  # type: ignore[no-any-return]


def experts() -> Any:
    torch.manual_seed(0)
    few = dict(num_key_value_heads=2, pad_token_id=0, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**few, **trainers.SIZES))


# --- losses over samples: of logits [b, c], and inputs with labels [b]


def logits_of(model: Any, inputs: Features) -> torch.Tensor:
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits  # type: ignore[no-any-return]


def of_classes(loss: Callable[[torch.Tensor, Features], torch.Tensor], **given: Any) -> Callable[..., Any]:
    given = {"model": classes, **OF_CLASSES, **given}
    return computing(lambda trainer, model, inputs: loss(logits_of(model, inputs), inputs), **given)


def each_sample(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    return F.cross_entropy(logits, inputs["labels"], reduction="none")


def class_weights(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    """The forum's class-weighted loss, a mean over weights."""
    return F.cross_entropy(logits, inputs["labels"], weight=torch.tensor([0.2, 1.0, 5.0]))


def sample_weights(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    return (each_sample(logits, inputs) * inputs["weights"]).mean()


def sample_weights_of_weights(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    return (each_sample(logits, inputs) * inputs["weights"]).sum() / inputs["weights"].sum()


def collate_weights(samples: list[Features]) -> Features:
    weights = torch.tensor([0.1 + sample["input_ids"][-1] % 7 for sample in samples])
    return {**trainers.collate_classes(samples), "weights": weights}


def contrastive(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    """Each sample's first logits against those of all others in the batch, as in SimCSE and CLIP."""
    found = F.normalize(logits, dim=1)
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


def in_numbers(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    """A loss that reads its own value on the host, as scripts do that print it or branch by it."""
    loss = F.cross_entropy(logits, inputs["labels"])
    return loss * 2 if loss.item() > 1e6 else loss


def entropy_of_batch(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    """Rewards batches that use all classes, by the entropy of their mean prediction."""
    mean = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, inputs["labels"]) + (mean * mean.log()).sum()


def hardest(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    """Only the harder half of a batch counts, as in online hard example mining."""
    return each_sample(logits, inputs).topk(max(len(logits) // 2, 1)).values.mean()


def of_eight(logits: torch.Tensor, inputs: Features) -> torch.Tensor:
    """A loss for batches of 8 alone, as scripts with ``drop_last`` may have."""
    return F.cross_entropy(logits.view(8, -1), inputs["labels"])


def balanced_by_gradients(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """Two losses weighted by the norms of their gradients, over the batch, as GradNorm does."""
    logits = logits_of(model, inputs)
    losses = F.cross_entropy(logits, inputs["labels"]), logits.square().mean()
    head = model.classifier.weight
    norms = [torch.autograd.grad(loss, head, retain_graph=True)[0].norm() for loss in losses]
    return losses[0] + losses[1] * (norms[0] / norms[1]).detach()


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


class LoggingTrainer(Trainer):  # type: ignore[misc]
    """Sums its loss in an attribute, counts in another, which is None until the first, and logs the mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sum = torch.tensor(0.0)
        self.forwards: int | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        loss = (found[0] if isinstance(found, tuple) else found).detach()
        self.sum, self.forwards = self.sum + loss, (self.forwards or 0) + 1
        return found

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        if self.forwards:
            logs["own"] = self.sum.item() / self.forwards
            self.sum, self.forwards = torch.tensor(0.0), None
        super().log(logs, *rest)


# --- collators and data


def popping_and_padding(samples: list[Features]) -> Features:
    """Takes labels out of the samples, which then have none, and makes their lists longer."""
    labels = [sample.pop("labels") for sample in samples]
    longest = max(map(len, labels))
    for sample, own in zip(samples, labels, strict=True):
        more = longest - len(own)
        sample["attention_mask"] = [1] * len(own) + [0] * more
        sample["input_ids"] += [0] * more
        own += [IGNORED] * more
    rows = {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}
    return {**rows, "labels": torch.tensor(labels)}


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
    ids = [*sample["input_ids"] * 9][:24]
    return {"input_ids": ids, "labels": ids}


def of_one_length() -> list[Features]:
    return [one_length(sample) for sample in trainers.make_data(NUM_SAMPLES)]


def one_class(sample: Features) -> Features:
    return {**sample, "input_ids": [3, *sample["input_ids"][1:]]}


def one_weight(sample: Features) -> Features:
    return {**sample, "input_ids": [*sample["input_ids"][:-1], 7]}


def without_targets(share: int) -> Callable[[], list[Features]]:
    """Data of which every sample but each ``share``-th has no target; none has one if it is 0."""

    def data() -> list[Features]:
        found = trainers.make_data(NUM_SAMPLES)
        for index, sample in enumerate(found):
            if not share or index % share:
                sample["labels"] = [IGNORED] * len(sample["labels"])
        return found

    return data


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

TARGETS: dict[str, Any] = {"labels": "targets", "collator": collate_targets, "remove_unused_columns": False}

HABITS: Mapping[str, Habit] = {
    "Llama": Habit(making()),
    "tied weights": Habit(making(lambda: llama(tie_word_embeddings=True))),
    "frozen layers": Habit(making(frozen)),
    "groups in the optimizer": Habit(making(kind=GroupsTrainer)),
    "gradient checkpointing": Habit(making(gradient_checkpointing=True)),
    "LoRA with a head that is trained": Habit(making(lambda: trainers.with_lora(llama(), modules_to_save=["lm_head"]))),
    "dynamic rotary frequencies": Habit(making(dynamic_rope, data=of_one_length)),
    "dynamic rotary frequencies of unlike lengths": Habit(making(dynamic_rope), REFUSED),
    "batch norm": Habit(classifying(with_batch_norm), "batch"),
    "a codebook that follows its input": Habit(classifying(with_codebook), REFUSED),
    "an average in an attribute": Habit(classifying(with_attribute), REFUSED, leaves="dropout.mean"),
    "targets of another name": Habit(of_tokens(F.cross_entropy, **TARGETS)),
    "targets of another name, one length at first": Habit(
        of_tokens(F.cross_entropy, **TARGETS, data=alike_at_first(one_length)), REFUSED
    ),
    "class weights": Habit(of_classes(class_weights), REFUSED),
    "class weights, one class at first": Habit(of_classes(class_weights, data=alike_at_first(one_class)), REFUSED),
    "class weights of tokens": Habit(of_tokens(class_weights_of_tokens), REFUSED),
    "label smoothing by hand": Habit(of_tokens(label_smoothing)),
    "NEFTune": Habit(making(neftune_noise_alpha=5.0, data=of_one_length), draws=True),  # which scales noise by length
    "label_smoothing_factor": Habit(making(label_smoothing_factor=0.1)),
    "focal loss of tokens": Habit(of_tokens(focal)),
    "last token": Habit(computing(last_token)),
    "weights of tokens over their number": Habit(of_tokens(token_weights_of_targets)),
    "weights of tokens over their sum": Habit(of_tokens(token_weights_of_weights), REFUSED),
    "weights of samples over their number": Habit(of_classes(sample_weights, collator=collate_weights)),
    "weights of samples over their sum": Habit(of_classes(sample_weights_of_weights, collator=collate_weights)),
    "weights of samples, one weight at first": Habit(
        of_classes(sample_weights_of_weights, collator=collate_weights, data=alike_at_first(one_weight))
    ),
    "mean over padding": Habit(of_tokens(mean_of_padded), REFUSED),
    "mean of means": Habit(computing(mean_of_means)),
    "a function that computes the loss": Habit(making(compute_loss_func=weighted_sum)),
    "L2 of weights and a mean": Habit(computing(decayed_mean)),
    "L2 of weights and Trainer's sum": Habit(making(kind=DecayedTrainer)),
    "two means over different numbers": Habit(computing(two_means), REFUSED),
    "distillation": Habit(making(kind=DistillingTrainer)),
    "distillation over padding": Habit(making(kind=PaddedDistillingTrainer), REFUSED),
    "experts balanced by hand": Habit(computing(balanced_by_hand, experts), REFUSED),
    "contrastive": Habit(of_classes(contrastive), REFUSED),
    "R-Drop": Habit(
        computing(r_drop, lambda: classes(hidden_dropout_prob=0.2), AveragingTrainer, **OF_CLASSES), draws=True
    ),
    "mixup": Habit(computing(mixup, classes, **OF_CLASSES), REFUSED),
    "center loss": Habit(classifying(kind=CentersTrainer), REFUSED),
    "a loss that is read": Habit(of_classes(in_numbers)),
    "entropy of a batch": Habit(of_classes(entropy_of_batch), REFUSED),
    "gradient penalty": Habit(computing(gradient_penalty, lambda: classes(attn_implementation="eager"), **OF_CLASSES)),
    "the hardest half": Habit(of_classes(hardest), REFUSED),
    "a step of its own": Habit(making(kind=OwnStepTrainer), REFUSED),
    "a step of its own of classes": Habit(classifying(kind=OwnStepTrainer), REFUSED),
    "two steps": Habit(making(kind=TwiceTrainer)),
    "two steps of classes": Habit(classifying(kind=TwiceTrainer)),
    "adversarial": Habit(classifying(kind=AdversarialTrainer), REFUSED),
    "noise in a gradient": Habit(making(kind=NoisyStepTrainer), REFUSED),
    "a teacher that follows": Habit(making(kind=TeacherTrainer), REFUSED, leaves="teacher"),
    "gradient changed in a step": Habit(making(kind=ScaledStepTrainer), REFUSED),
    "a sum and a count in attributes": Habit(classifying(kind=LoggingTrainer)),
    "a collator that pops and pads in place": Habit(
        making(collator=popping_and_padding, data=lambda: Copied(trainers.make_data(NUM_SAMPLES)))
    ),
    "padding on the left": Habit(making(collator=padding_left), "padding_side='right'"),
    "padding on the left, before prompts": Habit(making(collator=padding_left, data=after_prompts)),
    "a mask of four dimensions": Habit(making(collator=masking_pairs)),
    "a collator that draws": Habit(making(trainers.make_bert, kind=AveragingTrainer, collator=masking), draws=True),
    "data that draw": Habit(making(data=lambda: Drawing(trainers.make_data(NUM_SAMPLES)))),
    "every fifth sample has targets": Habit(making(data=without_targets(5))),
    "every fifth sample has targets, and a mean": Habit(making(trainers.make_bert, data=without_targets(5))),
    "no sample has targets": Habit(making(data=without_targets(0)), "target"),
    "an optimizer in backward": Habit(making(stepping_in_backward), "register_post_accumulate_grad_hook"),
    "a parameter of the trainer": Habit(computing(by_temperature, kind=TemperatureTrainer)),
    "losses balanced by their gradients": Habit(
        computing(balanced_by_gradients, classes, AveragingTrainer, **OF_CLASSES), REFUSED
    ),
    "a batch of eight": Habit(of_classes(of_eight, kind=AveragingTrainer), "runs 8 samples, but not one"),
    "gradients that are clamped": Habit(making(clamping), REFUSED),
    "spectral norm": Habit(classifying(spectral), REFUSED),
    "an LSTM over padding": Habit(classifying(recurrent), REFUSED),
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
        if ours is not None:
            made, given["adaptive"] = adaptive(made), ours
        settings = {**SETTINGS, "bf16": False, "gradient_checkpointing": False, **config, **settings}
        return made(
            model=llama(), args=trainers.arguments(folder, config_class, **settings),
            train_dataset=datasets.Dataset.from_list(ROWS[rows]()), processing_class=test_trl.make_tokenizer(), **given,
        )  # fmt: skip

    return make


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
    "answers": lambda: [{"prompt": each["prompt"], "completion": each["chosen"]} for each in pairs()],
}

TWO_MEANS = (
    r"[0-9.]+ % off.* Weighted by the .* they are [0-9.]+ % off, and weighted by samples [0-9.]+ %, as happens "
    "where a loss adds a mean over tokens to a mean over samples: then set the weight of one of the two to 0"
)

OF_TRL: Mapping[str, Habit] = {
    "SFT of answers": Habit(of_trl("SFT", "answers")),
    "DPO with aot": Habit(of_trl("DPO", loss_type=["aot"]), REFUSED),
    "DPO with bco_pair": Habit(of_trl("DPO", reference=llama, loss_type=["bco_pair"])),
    "DPO with a mean of tokens": Habit(of_trl("DPO", reference=llama, loss_type=["sigmoid", "sft"]), TWO_MEANS),
    "KTO": Habit(of_trl("KTO", "rated"), REFUSED),
    "KTO without KL": Habit(of_trl("KTO", "rated", reference=llama, loss_type="apo_zero_unpaired")),
    "CPO": Habit(of_trl("experimental.cpo.CPO"), TWO_MEANS),
    "CPO in half precision": Habit(of_trl("experimental.cpo.CPO", bf16=True), "cpo_alpha=1.0 of CPOT.*set it to 0"),
    "CPO without a mean of tokens": Habit(of_trl("experimental.cpo.CPO", loss_type="simpo", cpo_alpha=0.0)),
    "TPO": Habit(of_trl("experimental.tpo.TPO", "triples"), TWO_MEANS),
    "TPO without a mean of tokens": Habit(of_trl("experimental.tpo.TPO", "triples", loss_type="ipo", tpo_alpha=0.0)),
    "ORPO": Habit(of_trl("experimental.orpo.ORPO"), TWO_MEANS),
    "GKD": Habit(of_trl("experimental.gkd.GKD", "tokens", lmbda=0.0), draws=True),
    "GKD that generates": Habit(of_trl("experimental.gkd.GKD", "tokens", lmbda=1.0, max_new_tokens=4), "set lmbda=0"),
}
"""Habits that need TRL."""


# --- two devices


def sum_and_number(model: Any, inputs: Features) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = shifted(model, inputs)
    return each_token(logits, labels).sum(), (labels != IGNORED).sum()


def with_reduce(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    """A mean over the tokens of all devices, whose gradients DDP averages."""
    loss, number = sum_and_number(model, inputs)
    return loss / trainer.accelerator.reduce(number, "sum") * trainer.accelerator.num_processes


def with_all_reduce(trainer: Any, model: Any, inputs: Features) -> torch.Tensor:
    loss, number = sum_and_number(model, inputs)
    dist.all_reduce(number)
    return loss / number * dist.get_world_size()


ON_TWO_RANKS: Mapping[str, Callable[..., Any]] = {
    "reduce": computing(with_reduce),
    "all_reduce": computing(with_all_reduce),
}
"""Trainers whose losses need other ranks, to be refused."""
