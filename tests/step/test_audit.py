from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

from adaptive_batching import AdaptiveStep, ConfigError, _state
from adaptive_batching._ranks.agree import ALONE
from adaptive_batching._state import State
from adaptive_batching._step import judge
from adaptive_batching._step.judge import Audit
from tests.loop.test_step import SAMPLES, always, length, loss, make, mean_times_samples, texts
from tests.loop.test_step import collate as stock_collate
from tests.support.toy_work import ToyWork


def test_a_loss_that_looks_right_on_like_samples_is_found_out_by_the_first_unlike_ones() -> None:
    _, step = make(mean_times_samples, max_tokens=24)
    for _ in range(3):
        step(texts(*[8] * 6))  # of one length, where a mean over tokens looks like one over samples
    with pytest.raises(ConfigError, match=r"in two parts is [\d.]+ % off .* \(in step 4\).*sum and its number"):
        step(SAMPLES)


@pytest.mark.parametrize("by_length", [True, False])
def test_a_layer_that_reads_padding_is_found_out_by_the_first_samples_that_are_padded(by_length: bool) -> None:
    """It reads from the end, where all but the longest sample have padding; whether lengths are given or not."""

    class Backwards(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [b, c, s]
            return hidden.flip(2).cumsum(2).flip(2)

    _, step = make(norm=Backwards(), max_tokens=24 if by_length else 3, by_length=by_length)
    for _ in range(2):
        step(texts(*[8] * 6))
    with pytest.raises(ConfigError, match=r"% off that of the same batch in one \(in step 3\)"):
        step(texts(3, 8, 8, 3, 8, 3))


def test_samples_of_one_length_alone_are_looked_at_now_and_then() -> None:
    model, step = make(max_tokens=24)
    looks = []
    for number in range(1, 13):
        model.forwards.clear()
        step(texts(*[8] * 6))
        looks += [number] if len(model.forwards) > 2 else []
    assert looks == [1, 10]


def test_rounding_of_a_gradient_whose_terms_cancel_is_no_reason_to_stop() -> None:
    """Choices that differ in one word, by a new model: what is left of their gradients is a millionth."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def choices(length: int, chance: torch.Generator) -> torch.Tensor:  # [3, length]
        text = torch.randint(4, 96, (length,), generator=chance).repeat(3, 1)
        text[:, -1] = torch.arange(1, 4)
        return text

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        longest = max(sample.shape[1] for sample in samples)
        return torch.stack([nn.functional.pad(sample, (0, longest - sample.shape[1])) for sample in samples])

    def loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(input_ids=batch, attention_mask=(batch > 0).long()).logits
        return nn.functional.cross_entropy(logits, batch[:, 0, 0] % 3, reduction="sum"), len(batch)

    for seed in range(6):
        torch.manual_seed(seed)
        model = transformers.BertForMultipleChoice(config)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(0.1 if weights.dim() > 1 else 1.0)
        chance = torch.Generator().manual_seed(seed)
        step = AdaptiveStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss, collate, length=lambda s: s.shape[1]
        )
        step.max_tokens = 60
        assert 1 < step([choices(length, chance) for length in (25, 7, 30, 12)]) < 1.2


def test_memory_that_runs_out_where_gradients_are_compared_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, fails = judge._norm, iter([True])

    def short(tensor: torch.Tensor) -> float:
        if next(fails, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return norm(tensor)

    monkeypatch.setattr(judge, "_norm", short)
    _, step = make(max_tokens=64)
    step(SAMPLES)
    assert next(fails, None) is None and step._runner._audit._next == 1, "the next step is looked at"  # type: ignore[union-attr]
    step(SAMPLES)
    assert step._runner._audit._next == 10  # type: ignore[union-attr]


def test_a_gradient_that_depends_on_the_order_of_samples_is_no_rounding() -> None:
    def of_the_first(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        total, number = loss(model, batch)
        return total + 0.02 * float(batch["tokens"][0, 0]) * (total - total.detach()), number

    _, step = make(of_the_first, max_tokens=64)
    with pytest.raises(ConfigError, match="% off that of the same batch in one"):
        step(SAMPLES)


# Random numbers, which each sample has of its own: some are replaced by fixed ones, of others a warning says what draws


def _categories(hidden: torch.Tensor, **how: Any) -> torch.Tensor:
    return hidden.gather(-1, torch.multinomial(hidden.softmax(-1), hidden.shape[-1], **how))


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of features, [n, 6]
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax, hard": lambda h: F.gumbel_softmax(h, hard=True),
    "multinomial": _categories,
    "multinomial with replacement": lambda h: _categories(h, replacement=True),
    "poisson": lambda h: h * torch.poisson(h.exp()),
    "normal of tensors": lambda h: h + torch.normal(h, h.exp()),
    "normal of numbers": lambda h: h + torch.normal(0.0, 2.0, size=h.shape),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu of torch": lambda h: torch.rrelu(h, 0.1, 0.3, True),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "geometric_": lambda h: h * torch.empty_like(h).geometric_(0.3),
    "cauchy_": lambda h: h + torch.empty_like(h).cauchy_(),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_(),
    "random_": lambda h: h * torch.empty_like(h).random_(0, 5),
    "fractional pooling": lambda h: F.fractional_max_pool2d(h[:, None, :, None].expand(-1, 1, 6, 6), 2, 4)[
        :, 0, :, 0
    ].repeat(1, 2)[:, :6],
    "Normal": lambda h: D.Normal(h, 1.0).rsample(),
    "Categorical": lambda h: h * (1 + F.one_hot(D.Categorical(logits=h).sample(), 6)),
    "Bernoulli": lambda h: h * D.Bernoulli(logits=h).sample(),
    "Gamma": lambda h: D.Gamma(h.exp(), 1.0).rsample(),
    "Beta": lambda h: D.Beta(h.exp(), h.exp()).rsample(),
    "Dirichlet": lambda h: D.Dirichlet(h.exp()).rsample(),
    "Poisson": lambda h: h * D.Poisson(h.exp()).sample(),
    "Laplace": lambda h: D.Laplace(h, 1.0).rsample(),
    "Gumbel": lambda h: D.Gumbel(h, 1.0).rsample(),
    "Exponential": lambda h: D.Exponential(h.exp()).rsample(),
    "StudentT": lambda h: D.StudentT(h.exp() + 2).rsample(),
    "Binomial": lambda h: h * D.Binomial(5, h.sigmoid()).sample(),
    "RelaxedOneHotCategorical": lambda h: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=h).rsample(),
}
OF_BATCHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randperm": lambda h: h + h[torch.randperm(len(h))],
    "rand": lambda h: h + torch.rand(()) * h.flip(0),
}
UNNOTICED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multinomial of samples": lambda h: h + h[torch.multinomial(torch.ones(len(h)), len(h))],
    "Beta of a batch": lambda h: 0.7 * h + 0.3 * h.flip(0) * D.Beta(1.0, 1.0).sample(),
}
WARNED_OF = {  # by what is drawn: the function that does
    "gumbel_softmax": "gumbel_softmax", "gumbel_softmax, hard": "gumbel_softmax",
    "multinomial": "multinomial", "multinomial with replacement": "multinomial", "Categorical": "multinomial",
    "poisson": "poisson", "Poisson": "poisson", "Binomial": "binomial",
    "rrelu": "rrelu", "rrelu of torch": "rrelu", "fractional pooling": "fractional_max_pool2d",
    "geometric_": "geometric_", "cauchy_": "cauchy_", "log_normal_": "log_normal_",
    "Gamma": "_standard_gamma", "StudentT": "_standard_gamma",
    "Beta": "_sample_dirichlet", "Dirichlet": "_sample_dirichlet",
    "multinomial of samples": "multinomial", "Beta of a batch": "_sample_dirichlet",
}  # fmt: skip


class Draws(nn.Module):
    """Draws twice, as layers do, so that parts draw in another order than their batch."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.before, self.after = draw, nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.draw(self.draw(self.before(values)))).squeeze(-1)
        return result


def squares(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(batch) - 1).square().sum(), len(batch)


def drawing(draw: Callable[[torch.Tensor], torch.Tensor], loss: Any = squares) -> AdaptiveStep[torch.Tensor]:
    torch.manual_seed(0)
    model = Draws(draw)
    step: AdaptiveStep[torch.Tensor] = AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step.max_tokens = 3
    return step


@pytest.mark.parametrize("name", [*DRAWS, *UNNOTICED])
def test_a_model_that_draws_is_split_and_a_warning_names_what_cannot_be_compared(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert torch.isfinite(drawing({**DRAWS, **UNNOTICED}[name])([*torch.randn(8, 5)]))
    expected = [f"(by {WARNED_OF[name]})"] if name in WARNED_OF else []
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message[message.index("(by") : message.index(";")] for message in warned] == expected


def test_the_warning_of_what_draws_comes_once_and_says_what_would_go_unnoticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = drawing(F.gumbel_softmax)
    for _ in range(10):  # of which the first and the last are looked at
        step([*torch.randn(8, 5)])
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "parts of a batch cannot be compared with the whole, because random numbers are drawn (by gumbel_softmax); a "
        "loss or a model that uses statistics of the whole batch (in-batch negatives, a router's auxiliary loss) would "
        "go unnoticed"
    ]


def test_numbers_that_are_drawn_for_nothing_excuse_no_difference() -> None:
    def centred(hidden: torch.Tensor) -> torch.Tensor:
        torch.multinomial(torch.ones(5), 2)
        return hidden - hidden.mean(0)

    with pytest.raises(ConfigError, match="uses statistics of the whole batch"):
        drawing(centred)([*torch.randn(8, 5)])


def test_a_little_noise_does_not_hide_an_error_that_is_many_times_as_large() -> None:
    def centred(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden - hidden.mean(0)
        return hidden + 0.02 * F.gumbel_softmax(hidden) + 0.02 * F.gumbel_softmax(hidden)

    with pytest.raises(ConfigError, match="uses statistics of the whole batch"):
        drawing(centred)([*torch.randn(8, 5)])


def test_the_number_of_losses_has_to_add_up_whatever_is_drawn() -> None:
    def one_more(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch) - 1).square().sum(), len(batch) + 1

    with pytest.raises(ConfigError, match="as the number of losses of a batch in two parts"):
        drawing(lambda hidden: F.gumbel_softmax(F.gumbel_softmax(hidden)), one_more)([*torch.randn(8, 5)])


def test_a_generator_of_the_models_own_is_as_good_as_torchs(caplog: pytest.LogCaptureFixture) -> None:
    own = torch.Generator().manual_seed(0)

    def chosen(hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = hidden.gather(-1, torch.multinomial(hidden.softmax(-1), 6, generator=own))
        return hidden

    drawing(chosen)([*torch.randn(8, 5)])
    assert "(by multinomial)" in caplog.text


@pytest.mark.parametrize("name", OF_BATCHES)
def test_random_numbers_that_mix_samples_are_found_out(name: str) -> None:
    with pytest.raises(ConfigError, match="uses statistics of the whole batch"):
        drawing(OF_BATCHES[name])([*torch.randn(8, 5)])


class Codebook(nn.Module):
    """Moves with what it has seen: a second part meets another than the first."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, dtype=torch.double))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [b, c, s]
        hidden = hidden - self.seen[:, None]
        if self.training:
            self.seen += 0.5 * hidden.detach().mean((0, 2))
        return hidden


def test_a_model_that_changes_for_the_next_part_is_found_out_and_left_as_it_was() -> None:
    model, step = make(norm=Codebook(), max_tokens=24)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ConfigError, match="a forward pass changes it"):
        step(SAMPLES)
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_memory_that_runs_out_in_an_audit_is_no_matter(place: str, call: int) -> None:
    """It is looked at again in the next step."""
    model, step = make(max_tokens=64, max_grad_norm=0.5)
    _, clean = make(max_tokens=64, max_grad_norm=0.5)
    calls = iter(range(1, 10**6))

    def fail(*args: Any) -> None:
        if _state.rehearsing and torch.is_grad_enabled() and next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def fail_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    if place == "forward":
        model.out.register_forward_pre_hook(fail)
    else:
        model.out.register_forward_hook(fail_in_backward)
    for _ in range(2):
        torch.testing.assert_close(step(SAMPLES), clean(SAMPLES))
    assert step.num_recoveries == 0
    assert step._runner._audit._next == 10  # type: ignore[union-attr]


def test_an_error_in_an_audit_is_that_of_the_loss_and_leaves_all_as_it_was() -> None:
    def fails(model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            raise KeyError("in the loss")
        return loss(model, batch)

    model, step = make(fails, max_tokens=64)
    numbers = torch.get_rng_state()
    with pytest.raises(KeyError, match="in the loss"):
        step(SAMPLES)
    assert torch.equal(torch.get_rng_state(), numbers) and not _state.rehearsing
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("every", "expected"), [(None, [1, 10, 100]), (1, range(1, 121)), (50, [1, 51, 101])])
def test_steps_that_are_split_are_looked_at_now_and_then(every: int | None, expected: Any) -> None:
    looked = []
    parameter = nn.Parameter(torch.zeros(1))
    work = ToyWork()
    work.state, work.trained = State(), [parameter]
    audit = Audit(work, ALONE, "", every)

    def run(parts: Any) -> bool:
        parameter.grad = torch.tensor([float(sum(map(sum, parts)))])
        looked.append(number)
        return True

    for number in range(1, 121):
        if audit.is_due(number, again=False):
            audit.look([[1] * 8, [2]], run)
    assert sorted(set(looked)) == list(expected)


def test_a_step_that_is_not_split_is_looked_at_when_it_is() -> None:
    _, step = make()
    for _ in range(3):
        step(SAMPLES)
    step.max_tokens = 64
    step(SAMPLES)
    assert step._runner._audit._next == 10  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [0.25, 0.0])
def test_a_backward_that_divides_the_loss_is_refused(scale: float) -> None:
    _, step = make()
    with pytest.raises(ConfigError, match=r"backward multiplies the loss by .*gradient_accumulation_steps at 1"):
        step.gradients(SAMPLES, lambda value: (value * scale).backward())  # type: ignore[no-untyped-call]


def test_the_collate_function_gets_samples_of_its_own() -> None:
    """It may pop keys and pad in place, also before samples run again."""
    samples = [{"tokens": sample.tolist(), "meta": {"n": [1]}} for sample in SAMPLES]

    def collate(batch: list[dict[str, Any]]) -> Any:
        for sample in batch:
            assert sample.pop("meta")["n"].pop() == 1
            sample["tokens"] += []
        return stock_collate([torch.tensor(sample.pop("tokens")) for sample in batch])

    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = AdaptiveStep(model, optimizer, loss, collate, length=lambda sample: length(torch.tensor(sample["tokens"])))
    always(model, times=3)
    before = [str(sample) for sample in samples]
    step(samples)
    assert step.num_recoveries > 0 and [str(sample) for sample in samples] == before
