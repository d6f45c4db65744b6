"""Nets and flat rows hold the same numbers, in both directions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foogd.core.errors import InputError
from foogd.core.flat import Layout
from foogd.core.random import generator, with_seed
from foogd.nets import ScoreNet, WideResNet, bind_dropout


def make_nets(seed: int = 0) -> nn.ModuleDict:
    def start() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "backbone": WideResNet(1, depth=10, widen=1),
                "head": nn.Linear(64, 5),
                "personal_head": nn.Linear(64, 5),
                "score": ScoreNet(64, 16),
            }
        )

    nets = with_seed(generator(seed), start)
    bind_dropout(nets, generator(seed, "dropout"))
    return nets


def private(name: str) -> bool:
    return name.startswith("personal_head.")


def nobody(name: str) -> bool:
    return False


def forward(nets: nn.ModuleDict, x: Tensor) -> Tensor:
    z = nets["backbone"](x)
    return nets["head"](z) + nets["personal_head"](z) + nets["score"](nets["score"].scale(z), 0.5).sum(1, keepdim=True)


def images(n: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(n, 1, 16, 16, generator=generator(seed, "images"))


def bound(seed: int = 0, personal: Callable[[str], bool] = private) -> tuple[nn.ModuleDict, Layout, Tensor, Tensor]:
    nets = make_nets(seed)
    layout = Layout.of(nets, personal)
    shared, own, _ = layout.pack(nets)
    layout.bind(nets, shared, own)
    return nets, layout, shared, own


def test_every_value_has_exactly_one_place() -> None:
    nets = make_nets()
    layout = Layout.of(nets, private)
    state = nets.state_dict()
    assert {*layout.slices, *layout.integer_names} == set(state)
    assert [n for n in state if n in layout.slices] == list(layout.slices)
    assert set(layout.personal_names) == {"personal_head.weight", "personal_head.bias"}
    assert set(layout.shared_names) == set(layout.slices) - set(layout.personal_names)
    for row, size in (("shared", layout.shared_size), ("personal", layout.personal_size)):
        covered = torch.zeros(size, dtype=torch.int64)
        for place in (p for p in layout.slices.values() if p.row == row):
            covered[place.offset : place.offset + place.shape.numel()] += 1
        assert torch.equal(covered, torch.ones_like(covered))
    assert layout.shared_size + layout.personal_size == sum(v.numel() for v in state.values() if v.is_floating_point())
    assert "backbone.bn.running_mean" in layout.shared_names
    assert {"score.centre", "score.spread"} <= set(layout.shared_names)


def test_rows_go_round_bit_by_bit() -> None:
    source, target = make_nets(0), make_nets(1)
    layout = Layout.of(source, private)
    assert layout == Layout.of(target, private)
    rows = layout.pack(source)
    shared, own, _ = layout.pack(target)
    layout.bind(target, shared, own)
    shared.copy_(rows[0])
    own.copy_(rows[1])
    layout.load_integers(target, rows[2])
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name]), name
    again = layout.pack(target)
    assert torch.equal(again[0], rows[0])
    assert torch.equal(again[1], rows[1])


def test_pack_copies() -> None:
    nets = make_nets()
    layout = Layout.of(nets, private)
    before = copy.deepcopy(nets.state_dict())
    shared, own, integers = layout.pack(nets)
    for row in (shared, own, *integers.values()):
        row.fill_(7)
    assert all(torch.equal(before[k], v) for k, v in nets.state_dict().items())


@pytest.mark.parametrize("training", [False, True])
def test_binding_changes_no_output(training: bool) -> None:
    free, (tied, *_) = make_nets(), bound()
    free.train(training)
    tied.train(training)
    assert torch.equal(forward(free, images()), forward(tied, images()))


def test_a_training_step_moves_the_row_and_the_row_moves_the_nets() -> None:
    free, (nets, layout, shared, own) = make_nets(), bound()
    for net in (free, nets):
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            optimiser.zero_grad()
            forward(net, images(seed=step)).square().mean().backward()
            optimiser.step()
    expected = layout.pack(free)
    assert torch.equal(shared, expected[0])
    assert torch.equal(own, expected[1])
    shared.zero_()
    assert all(not v.any() for n, v in nets.state_dict().items() if n in layout.shared_names)
    assert nets["personal_head"].weight.any()


def test_training_mode_writes_batch_statistics_into_the_row() -> None:
    nets, layout, shared, _ = bound()
    before = shared.clone()
    with torch.no_grad():
        nets["backbone"](images())
    changed = {n for n, v in layout.named(shared).items() if not torch.equal(v, layout.named(before)[n])}
    assert changed == {n for n in layout.shared_names if "running_" in n}


def test_what_a_score_network_measures_is_written_into_the_row() -> None:
    nets, layout, shared, _ = bound()
    before = shared.clone()
    score = nets["score"]
    with torch.no_grad():
        score.measure(score.moments(nets["backbone"].eval()(images()), torch.zeros(8, dtype=torch.int64)))
    changed = {n for n, v in layout.named(shared).items() if not torch.equal(v, layout.named(before)[n])}
    assert changed == {"score.centre", "score.spread"}
    nets.eval()
    after = shared.clone()
    forward(nets, images(seed=1))
    assert torch.equal(shared, after)


def test_a_deep_copy_is_independent_of_the_row() -> None:
    nets, layout, shared, own = bound()
    twin = copy.deepcopy(nets)
    kept = layout.pack(twin)
    shared.fill_(3)
    own.fill_(3)
    assert torch.equal(layout.pack(twin)[0], kept[0])
    assert torch.equal(layout.pack(twin)[1], kept[1])
    for value in (*twin.parameters(), *twin.buffers()):
        value.data.fill_(5)
    assert (shared == 3).all()
    assert (own == 3).all()


def test_integer_buffers_stay_integers_outside_the_rows() -> None:
    nets, layout, _, _ = bound()
    assert set(layout.integer_names) == {n for n in nets.state_dict() if n.endswith("num_batches_tracked")}
    assert len(layout.integer_names) == sum(isinstance(m, nn.BatchNorm2d) for m in nets.modules())
    forward(nets, images())
    integers = layout.pack(nets)[2]
    assert all(v.dtype == torch.int64 and int(v) == 1 for v in integers.values())
    layout.load_integers(nets, {n: torch.tensor(2**53 + 1) for n in integers})
    assert int(nets["backbone"].bn.num_batches_tracked) == 2**53 + 1
    with pytest.raises(InputError, match="num_batches_tracked"):
        layout.load_integers(nets, {})


def test_named_shows_what_travels_and_nothing_else() -> None:
    nets, layout, shared, own = bound()
    views = layout.named(shared)
    assert tuple(views) == layout.shared_names
    assert all(torch.equal(v, nets.state_dict()[n]) for n, v in views.items())
    views["head.bias"].fill_(9)
    assert (nets["head"].bias == 9).all()
    assert set(layout.named(shared, own)) == set(layout.slices)


def test_without_private_nets_the_personal_row_is_empty() -> None:
    _, layout, shared, own = bound(personal=nobody)
    assert own.shape == (0,)
    assert layout.personal_names == ()
    assert shared.numel() == layout.shared_size


def test_tied_parameters_stay_tied() -> None:
    nets = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    nets["b"].weight = nets["a"].weight
    layout = Layout.of(nets, nobody)
    assert layout.shared_size == 9
    shared, own, _ = layout.pack(nets)
    layout.bind(nets, shared, own)
    assert nets["a"].weight is nets["b"].weight
    shared.fill_(2)
    assert (nets["b"].weight == 2).all()
    assert Layout.of(nets, nobody) == layout
    with pytest.raises(InputError, match="tied"):
        Layout.of(nets, lambda name: name.startswith("b."))


def test_a_shared_module_keeps_its_buffers_shared() -> None:
    norm = nn.BatchNorm1d(3)
    nets = nn.ModuleDict({"a": norm, "b": nn.Sequential(nn.Linear(3, 3), norm)})
    layout = Layout.of(nets, nobody)
    assert layout.shared_size == 12 + 12
    shared, own, _ = layout.pack(nets)
    layout.bind(nets, shared, own)
    nets["b"](torch.randn(8, 3))
    assert torch.equal(layout.named(shared)["a.running_mean"], norm.running_mean)
    row = torch.rand(layout.shared_size)
    torch.testing.assert_close(layout.from_second_moments(layout.to_second_moments(row)), row)


def test_bound_frozen_parameters_stay_frozen() -> None:
    nets = make_nets()
    nets["head"].requires_grad_(False)
    layout = Layout.of(nets, private)
    layout.bind(nets, *layout.pack(nets)[:2])
    assert not nets["head"].weight.requires_grad
    assert nets["personal_head"].weight.requires_grad
    assert all(p.is_leaf for p in nets.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_other_number_types_are_refused(dtype: torch.dtype) -> None:
    nets = nn.ModuleDict({"head": nn.Linear(2, 2, dtype=dtype)})
    with pytest.raises(InputError, match=r"head\.weight.*float32"):
        Layout.of(nets, nobody)


def test_rows_of_another_model_are_refused() -> None:
    nets, layout, shared, own = bound()
    with pytest.raises(InputError, match=str(layout.shared_size)):
        layout.bind(nets, shared[:-1], own)
    with pytest.raises(InputError, match="personal"):
        layout.bind(nets, shared, own.double())


def test_layout_works_on_meta() -> None:
    with torch.device("meta"):
        nets = make_nets()
    layout = Layout.of(nets, private)
    shared, own, _ = layout.pack(nets)
    layout.bind(nets, shared, own)
    assert shared.is_meta
    assert layout == Layout.of(make_nets(), private)


# --- exact pooling of batch statistics -------------------------------------------------------------------------------


def test_pooled_second_moments_are_those_of_all_data_together() -> None:
    nets = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 2), "other": nn.BatchNorm1d(4)})
    layout = Layout.of(nets, nobody)
    data = [10 * k + (1 + k) * torch.randn(100, 4, generator=generator(k)) for k in range(3)]
    rows = []
    for part in data:
        shared = layout.pack(nets)[0]
        for owner in ("norm", "other"):
            layout.named(shared)[f"{owner}.running_mean"].copy_(part.mean(0))
            layout.named(shared)[f"{owner}.running_var"].copy_(part.var(0, correction=0))
        rows.append(shared)
    stacked = torch.stack(rows)
    pooled = layout.named(layout.from_second_moments(layout.to_second_moments(stacked).mean(0)))
    together = torch.cat(data)
    for owner in ("norm", "other"):
        torch.testing.assert_close(pooled[f"{owner}.running_mean"], together.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pooled[f"{owner}.running_var"], together.var(0, correction=0), rtol=1e-4, atol=1e-4)
        plain = layout.named(stacked.mean(0))[f"{owner}.running_var"]
        assert (plain < 0.5 * pooled[f"{owner}.running_var"]).all()
    torch.testing.assert_close(pooled["head.weight"], nets["head"].weight)


def test_second_moments_touch_shared_variances_only() -> None:
    nets, layout, shared, _ = bound()
    forward(nets, images())
    before = shared.clone()
    there = layout.to_second_moments(shared)
    assert torch.equal(shared, before)
    changed = {n for n, v in layout.named(there).items() if not torch.equal(v, layout.named(before)[n])}
    assert changed == {n for n in layout.shared_names if n.startswith("backbone.") and n.endswith("running_var")}
    torch.testing.assert_close(layout.from_second_moments(there), before, rtol=1e-5, atol=1e-6)
    kept_at_home = Layout.of(nets, lambda name: "running_" in name)
    assert [len(index) for index in kept_at_home.pooled_moments] == [0, 0]
    row = torch.rand(kept_at_home.shared_size)
    assert torch.equal(kept_at_home.to_second_moments(row), row)


def test_a_variance_is_never_negative() -> None:
    layout = Layout.of(nn.ModuleDict({"norm": nn.BatchNorm1d(2)}), nobody)
    row = torch.zeros(layout.shared_size)
    layout.named(row)["norm.running_mean"].fill_(1000.0)
    layout.named(row)["norm.running_var"].fill_(1000.0**2 - 10)
    assert (layout.named(layout.from_second_moments(row))["norm.running_var"] == 0).all()
