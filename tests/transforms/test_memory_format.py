"""channels_last: group F of the field cases."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from hotloop import fast_eval, optimize
from hotloop._facts import Facts, machine, traits
from hotloop.transforms import memory_format
from observing import in_threads

CE = nn.CrossEntropyLoss()


def net(channels: int = 16, inputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(inputs, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 2),
    )


def images(count: int = 4, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(count)]


def assert_same_draws(model, plain):
    x = images(1)[0][0]
    torch.manual_seed(3)
    ours = model(x)
    torch.manual_seed(3)
    assert torch.allclose(ours, plain(x), atol=1e-5)


def in_format(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


class Seen(nn.Module):
    """Notes what arrives at the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.formats = net(), []

    def forward(self, x, *more):
        self.formats = [t.stride() for t in (x, *more)]
        return self.body(x)


@pytest.mark.parametrize("wish", ["auto", True])
def test_floating_images_follow_and_nothing_else_does(wish):
    """F1, F3, F7: by dimensions, in any container."""
    raw = Seen()
    parameters = list(raw.parameters())
    model = optimize(raw, channels_last=wish).eval()
    assert all(p is q for p, q in zip(raw.parameters(), parameters, strict=True))
    x = images(1)[0][0]
    model(x, torch.zeros(2, 3), torch.zeros(1, 2, 3, 4, 5), torch.zeros(2, 3, 4, 5, dtype=torch.int64), torch.zeros(2, 3, 4))
    assert raw.formats[0] == x.contiguous(memory_format=torch.channels_last).stride()
    assert raw.formats[1:] == [(3, 1), (120, 60, 20, 5, 1), (60, 20, 5, 1), (12, 4, 1)]
    assert x.is_contiguous()
    model(x=x)
    assert raw.formats == [x.contiguous(memory_format=torch.channels_last).stride()]


@pytest.mark.parametrize(("wish", "converted"), [("auto", False), (True, True)])
def test_weights_are_converted_on_wish_alone(wish, converted):
    """In the user's loop `p.view(-1)` and `p.grad.view(-1)` work on."""
    raw = net()
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE, channels_last=wish).step
    assert step.plan["channels_last"].choice == "on"
    step(*images(1)[0])
    assert in_format(raw[3].weight) is converted
    assert in_format(raw[3].weight.grad) is converted


@pytest.mark.parametrize("shape", [(4, 1, 6, 5), (1, 1, 6, 5), (4, 7, 1, 1), (0, 3, 4, 4)])
def test_images_that_are_in_both_formats_are_not_copied(shape):
    """Their strides tell, so that what is computed from them is in the format as well."""
    raw = Seen()
    raw.body, seen = nn.Sequential(nn.Conv2d(shape[1], 16, 1), nn.MaxPool2d(1), nn.MaxPool2d(1), nn.Conv2d(16, 1, 1)), []
    raw.body[0].register_forward_hook(lambda module, args, output: seen.append((args[0].data_ptr(), output)))
    x = torch.randn(shape)
    optimize(raw, channels_last=True).eval()(x)
    assert seen[0][0] == x.data_ptr()
    if x.numel():
        assert seen[0][1].stride()[1] == 1


@pytest.mark.parametrize("train", [True, False])
def test_what_a_call_returns_can_be_viewed(train):
    """As the plain model's output can; gradients flow through."""
    raw = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)])
    model = optimize(raw, cudnn_benchmark=None).train(train)
    output = model(torch.randn(2, 16, 8, 8))
    assert output.view(2, -1).shape == (2, 1024)
    assert output.requires_grad is train
    if train:
        output.view(-1).sum().backward()
        assert raw[0].weight.grad.view(-1).abs().sum() > 0


@pytest.mark.parametrize("optimizer", [lambda p: Adam(p, 0.01), lambda p: SGD(p, 0.1, momentum=0.9)], ids=["Adam", "SGD"])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("wish", ["auto", True])
def test_it_trains_as_the_plain_loop_does(optimizer, running, wish):
    """With the state of a running optimizer, whose strides a fused kernel would misread."""
    raw, plain = net(), net()
    ours, theirs = optimizer(raw.parameters()), optimizer(plain.parameters())
    for model, optim in ((raw, ours), (plain, theirs)) if running else ():
        train(model, optim, images(3, seed=2))
    step = optimize(raw, ours, CE, precision="fp32", channels_last=wish).step
    assert (step.plan["channels_last"].choice, step.plan["fused_optimizer"].choice) == ("on", "on")
    for x, y in images():
        step(x, y)
    train(plain, theirs, images())
    for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-3)


def train(model, optimizer, data) -> None:
    for x, y in data:
        optimizer.zero_grad()
        CE(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
def test_a_contiguous_checkpoint_is_loaded_into_it(fused):
    plain = net()
    theirs = SGD(plain.parameters(), 0.1, momentum=0.9)
    train(plain, theirs, images(3))
    raw = net()
    ours = SGD(raw.parameters(), 0.1, momentum=0.9, fused=fused)
    model, step = optimize(raw, ours, CE, channels_last=True)
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert in_format(raw[3].weight)
    assert in_format(ours.state[raw[3].weight]["momentum_buffer"])
    for x, y in images(3, seed=3):
        step(x, y)
    train(plain, theirs, images(3, seed=3))
    for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)
    net().load_state_dict(model.state_dict())


class Views(nn.Module):
    """F4: `.view` on a feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.MaxPool2d(2)
        self.head, self.drop = nn.Linear(16 * 16, 2), nn.Dropout()

    def forward(self, x):
        return self.head(self.drop(self.pool(self.norm(self.conv(x))).view(len(x), -1)))


def test_code_that_cannot_bear_it_falls_back_and_loses_nothing():
    torch.manual_seed(0)
    raw = Views()
    plain = copy.deepcopy(raw)
    strides = [p.stride() for p in raw.parameters()]
    ours, theirs = Adam(raw.parameters()), Adam(plain.parameters())
    step = optimize(raw, ours, CE, fused=False).step
    assert step.plan["channels_last"].choice == "on"
    torch.manual_seed(5)
    for x, y in images():
        step(x, y)
    assert step.plan["channels_last"].choice == "off"
    assert "view" in step.plan["channels_last"].why
    assert [p.stride() for p in raw.parameters()] == strides
    torch.manual_seed(5)
    train(plain, theirs, images())
    assert all(torch.equal(a, b) for a, b in zip(raw.state_dict().values(), plain.state_dict().values(), strict=True))


def test_an_explicit_wish_does_not_fall_back():
    raw = Views()
    model = optimize(raw, channels_last=True).eval()
    with pytest.raises(RuntimeError, match="view"):
        model(images(1)[0][0])


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.deep = nn.Conv2d(3, 16, 3), nn.Conv3d(3, 16, 3)


def shallow() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1))


def with_dropout(layer: nn.Module, *, before: int) -> nn.Sequential:
    """`net()` with a layer more."""
    layers = list(net())
    return nn.Sequential(*layers[:before], layer, *layers[before:])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(4, 2), "no 2-D convolution"),
        (lambda: nn.Conv1d(3, 16, 3), "no 2-D convolution"),
        (Hybrid, "3-D convolutions"),
        (lambda: net(8), "too shallow"),
        (shallow, "too shallow"),
        (lambda: nn.Sequential(*net(), nn.InstanceNorm2d(2)), "instance normalisation"),
        (lambda: nn.Sequential(nn.Conv1d(3, 3, 3), *net()), "1-D convolutions"),
        (lambda: net().double(), "float32"),
        (lambda: nn.Sequential(*net(), nn.Conv2d(8, 64, 1, stride=2)), "writes beyond its memory"),
        (lambda: with_dropout(nn.Dropout(), before=3), "dropout"),
        (lambda: with_dropout(nn.AlphaDropout(), before=4), "dropout"),
        (lambda: with_dropout(nn.Sequential(nn.ReLU(), nn.Dropout()), before=3), "dropout"),
    ],
)
def test_off_with_the_reason(make, reason):
    raw = make()
    strides = [p.stride() for p in raw.parameters()]
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE).step
    assert step.plan["channels_last"].choice == "off"
    assert reason in step.plan["channels_last"].why
    assert [p.stride() for p in raw.parameters()] == strides


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 2), Hybrid, lambda: nn.Conv3d(3, 16, 3), lambda: nn.Conv2d(8, 64, 1, stride=2)]
)
def test_a_wish_that_cannot_be_met_raises(make):
    with pytest.raises(ValueError, match=r"optimize\(\.\.\., channels_last=True\): the model has"):
        optimize(make(), channels_last=True)
    with pytest.raises(ValueError, match="channels_last='yes'"):
        optimize(net(), channels_last="yes")


def test_the_users_own_format_stays():
    raw = net().to(memory_format=torch.channels_last)
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE).step
    assert step.plan["channels_last"].choice == "as it is"
    assert in_format(raw[3].weight)


@pytest.mark.parametrize(
    ("layer", "before"),
    [
        (nn.Dropout(), 5),  # behind the pooling
        (nn.Dropout(), 6),  # behind the Flatten
        (nn.Dropout(0.0), 3),
        (nn.Dropout2d(), 3),  # a number for each channel
        (nn.FeatureAlphaDropout(), 3),
        (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 16)), 5),
        (nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Linear(16, 16)), 5),
    ],
)
def test_a_dropout_that_draws_the_same_mask_does_not_keep_it_off(layer, before):
    """Most classifiers have one in their head."""
    raw = with_dropout(layer, before=before)
    plain = copy.deepcopy(raw)
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE, cudnn_benchmark=False)
    assert step.plan["channels_last"].choice == "on"
    assert_same_draws(model, plain)


def test_a_dropout_on_feature_maps_draws_the_mask_of_the_plain_loop():
    raw = with_dropout(nn.Dropout(), before=3)
    plain = copy.deepcopy(raw)
    assert_same_draws(optimize(raw, SGD(raw.parameters(), 0.1), CE, cudnn_benchmark=False).model, plain)


def test_exact_leaves_it_off():
    raw = net()
    assert optimize(raw, SGD(raw.parameters(), 0.1), CE, exact=True).step.plan["channels_last"].choice == "off"


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_on_an_accelerator_with_wide_convolutions_in_16_bits_alone(device, channels, bits):
    facts = Facts(machine(), traits([net(channels, inputs=32)]), device=torch.device(device), sixteen_bit=bits == 16)
    choice = "on" if (device, channels, bits) == ("cuda", 64, 16) else "off"
    assert memory_format.decide(facts, "auto").choice == choice


def test_a_view_of_a_feature_map_by_another_method_or_in_the_loop():
    """Neither is a call of the wrapped model, and neither sees another layout."""

    class Encoder(Views):
        def encode(self, x):
            return self.pool(self.norm(self.conv(x))).view(len(x), -1)

        def forward(self, x):
            return self.head(self.pool(self.norm(self.conv(x))).flatten(1))

    raw = Encoder()
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE)
    x, y = images(1)[0]
    step(x, y)
    assert step.plan["channels_last"].choice == "on"
    assert model.encode(x).shape == (4, 256)
    assert model.conv(x).view(4, -1).shape == (4, 1024)


def test_ties_survive_and_reverting_restores_the_strides():
    raw = net()
    raw.add_module("twin", nn.Conv2d(16, 16, 3, padding=1))
    raw.twin.weight = raw[3].weight
    raw[6], raw[5], raw[4] = nn.Identity(), nn.Identity(), nn.Identity()
    before = {name: (p.stride(), p.detach().clone()) for name, p in raw.named_parameters()}
    ours = SGD(raw.parameters(), 0.1, momentum=0.9)
    step = optimize(raw, ours, lambda o, y: o.mean(), channels_last=True).step
    assert raw.twin.weight is raw[3].weight
    assert in_format(raw[3].weight)
    step._live.parts = step.plan["channels_last"].revert(step._live.parts)
    for name, p in raw.named_parameters():
        assert p.stride() == before[name][0]
        assert torch.equal(p, before[name][1])
    raw(images(1)[0][0])
    assert step._live.parts.on_outputs == ()


@pytest.mark.parametrize(("wish", "few", "many"), [("auto", False, True), (True, True, True)])
def test_few_pixels_are_not_worth_the_layout_of_many_weights(wish, few, many):
    """A CPU's kernels lay contiguous weights out in every call; weights that are converted already cost nothing."""
    seen = []
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), *[nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)], nn.Flatten(), nn.Linear(16 * 36, 64)
    )
    model[0].register_forward_pre_hook(lambda module, args: seen.append(in_format(args[0])))
    wrapped = optimize(model, precision="fp32", channels_last=wish).eval()
    for batch in (1, 4):
        wrapped(torch.randn(batch, 3, 8, 8))
    assert 192 < sum(p.numel() for p in model.parameters()) // 128 < 4 * 192
    assert seen == [few, many]


@pytest.mark.parametrize("threads", [False, True])
def test_what_a_forward_changes_in_its_input_the_caller_sees(threads):
    class Normalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), *[nn.Conv2d(16, 16, 1) for _ in range(6)], nn.Conv2d(16, 3, 1)
            )

        def forward(self, x):
            x.sub_(0.5).div_(0.25)
            assert in_format(x)
            return self.body(x)

    model = optimize(Normalising(), precision="fp32", channels_last="auto", device="cpu").eval()
    seen = []

    def call(seed):
        x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        given = x.clone()
        model(x)
        seen.append(torch.equal(x, given.sub_(0.5).div_(0.25)) and x.is_contiguous())

    if threads:
        in_threads([partial(call, seed) for seed in range(4)])
    else:
        call(0)
    assert all(seen)


class Keeps(nn.Module):
    """Holds on to a feature map, as models do whose maps are drawn or go into a loss."""

    def __init__(self, how=None):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), *[nn.Conv2d(16, 16, 1) for _ in range(6)])
        self.head = nn.Linear(16, 2)
        self.how, self.seen, self.maps = how, [], {}
        if how == "buffer":
            self.register_buffer("kept", None)
        else:
            self.kept = None

    def forward(self, x):
        h = self.body(x)
        self.seen.append(in_format(h))
        if self.how == "container":
            self.maps["last"] = h
        elif self.how is not None:
            self.kept = h
        return self.head(h.mean((2, 3)))

    def last(self):
        return self.maps["last"] if self.how == "container" else self.kept


@pytest.mark.parametrize("form", ["own loss", "batch", "eval", "inference mode"])
@pytest.mark.parametrize("how", ["attribute", "buffer", "container"])
def test_feature_maps_that_a_model_keeps_can_be_viewed(how, form):
    """The user's code gets hold of them outside of any call that could be run again."""
    torch.manual_seed(0)
    raw = Keeps(how)
    plain, (x, y) = copy.deepcopy(raw), images(1)[0]
    optimizer, inference = SGD(raw.parameters(), 0.1), "inference_mode" if form == "inference mode" else "no_grad"
    model, step = optimize(raw, optimizer, CE, precision="fp32", cudnn_benchmark=False, inference=inference, device="cpu")
    assert step.plan["channels_last"].choice == "on"
    for loop in (model, plain):
        if form == "batch":
            if loop is model:
                step(x, y)
            else:
                plain(x)
            continue
        loop.train(form == "own loss")
        loss = CE(loop(x), y)
        if form == "own loss":
            loss = loss + loop.last().view(4, 16, -1).mean(2).square().sum()
            step(loss) if loop is model else loss.backward()
    torch.testing.assert_close(model.last().view(4, -1), plain.last().view(4, -1), rtol=1e-4, atol=1e-5)
    assert raw.seen[0]
    assert "keeps feature maps" in step.plan["channels_last"].why
    if form == "own loss":
        for ours, theirs in zip(raw.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    model(x)
    assert not raw.seen[-1]
    assert step._live.recovery is None


def test_a_map_that_was_there_before_is_none_that_the_call_has_made():
    raw = Keeps()
    raw.kept = torch.randn(2, 4, 4, 3).permute(0, 3, 1, 2)
    stride = raw.kept.stride()
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False).step
    step(*images(1)[0])
    assert step.plan["channels_last"].choice == "on"
    assert raw.kept.stride() == stride


def test_images_stay_as_they_are_while_a_hook_may_keep_a_map():
    """As Grad-CAM and feature extractors do, which come and go."""
    raw, maps = Keeps(), []
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False)
    x, y = images(1)[0]
    step(x, y)
    handle = model.body[3].register_forward_hook(lambda module, args, output: maps.append(output))
    loss = CE(model(x), y) + sum(m.view(4, 16, -1).mean() for m in maps)
    step(loss)
    handle.remove()
    step(x, y)
    assert raw.seen == [True, False, True]
    assert step.plan["channels_last"].choice == "on"


def test_hooks_of_torch_itself_keep_no_maps():
    def observer(module, args, output):
        return None

    observer.__module__ = "torch.ao.quantization.quantize"
    raw = Keeps()
    raw.body[3].register_forward_hook(observer)
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False).step
    step(*images(1)[0])
    assert raw.seen == [True]


def test_a_layout_that_was_asked_for_stays():
    raw = Keeps("attribute")
    raw.body[3].register_forward_hook(lambda module, args, output: None)
    model, step = optimize(
        raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False, channels_last=True
    )
    step(*images(1)[0])
    model(images(1)[0][0])
    assert raw.seen == [True, True]
    assert step.plan["channels_last"].choice == "on"


def test_a_view_in_a_backward_of_the_users_own_loss_names_the_way_out():
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.view(-1).view(grad.shape)

    class Net(Keeps):
        def forward(self, x):
            return self.head(torch.relu(Flat.apply(self.body(x))).mean((2, 3)))

    raw = Net()
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False)
    x, y = images(1)[0]
    with pytest.raises(RuntimeError, match=r"view size(?s:.)*optimize\(\.\.\., channels_last=False\)"):
        step(CE(model(x), y))


# What a layer does to a map, and whether it does something else where the map is laid out in another way.
REACHING = {
    "scatter_ into flatten": lambda h, out: out.flatten(1).scatter_(1, h.flatten(1).topk(3, 1).indices, 1.0),
    "a part of flatten": lambda h, out: out.flatten(1)[:, :40].fill_(1.0),
    "assignment to reshape": lambda h, out: out.reshape(len(h), -1).__setitem__((slice(None), 0), 1.0),
    "+= on ravel": lambda h, out: out.ravel().__iadd__(1.0),
    "data of contiguous": lambda h, out: out.contiguous().data.fill_(1.0),
    "relu in place": lambda h, out: torch.nn.functional.relu(out.sub_(1.0).flatten(1), inplace=True),
    "a permuted map made contiguous": lambda h, out: out.permute(0, 2, 3, 1).contiguous().fill_(1.0),
    "a permuted map reshaped": lambda h, out: out.permute(0, 2, 3, 1).reshape(len(h), -1).fill_(1.0),
    "as_strided": lambda h, out: out.add_(torch.as_strided(h.detach(), (4, 16, 2, 2), (576, 36, 6, 1)).sum()),
}
HARMLESS = {
    "flatten": lambda h, out: out.add_(h.flatten(1).mean()),
    "a view in both layouts": lambda h, out: out.flatten(2).fill_(1.0),
    "flatten and write to a copy": lambda h, out: h.flatten(1).clone().fill_(1.0),
    "write to the map": lambda h, out: out.fill_(1.0),
    "permuted, reshaped and read": lambda h, out: out.add_(h.permute(0, 2, 3, 1).reshape(len(h), -1, 16).mean()),
    "sparse": lambda h, out: out.add_((torch.eye(16).to_sparse() @ torch.ones(16, 1)).reshape(-1)[0]),
}


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), *[nn.Conv2d(16, 16, 1) for _ in range(6)])
        self.head, self.write = nn.Linear(16, 2), write

    def forward(self, x):
        h = self.body(x)
        out = torch.zeros_like(h)
        self.write(h, out)
        return self.head((h + out).mean((2, 3)))


@pytest.mark.parametrize("form", ["batch", "loss", "eval", "evaluation of a plain model"])
@pytest.mark.parametrize(("write", "choice"), [
    *[pytest.param(write, "off", id=name) for name, write in REACHING.items()],
    *[pytest.param(write, "on", id=name) for name, write in HARMLESS.items()],
])  # fmt: skip
def test_a_write_reaches_a_map_as_in_the_plain_loop(write, choice, form):
    """Nothing raises where it reaches a copy, and the result is another."""
    raw, (x, y) = Writes(write), images(1)[0]
    expected = copy.deepcopy(raw)(x)
    if form == "evaluation of a plain model":
        torch.testing.assert_close(fast_eval(lambda model: model(x))(raw), expected.detach(), rtol=1e-4, atol=1e-4)
        return
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False)
    if form == "batch":
        assert step(x, y)["loss"] == pytest.approx(CE(expected, y).item(), rel=1e-4)
    else:
        torch.testing.assert_close(model.train(form == "loss")(x), expected, rtol=1e-4, atol=1e-4, check_device=False)
    assert step.plan["channels_last"].choice == choice


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_compiled_parts_of_a_model_stay_compiled():
    raw = Keeps()
    raw.head.compile(backend="eager")
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False).step
    assert step(*images(1)[0]).updated
    assert step.plan["channels_last"].choice == "on"


@pytest.mark.parametrize("before", ["small images", "a hook"])
def test_a_first_call_that_was_not_laid_out_tells_nothing_of_the_next(before):
    write, (x, y) = REACHING["scatter_ into flatten"], images(1)[0]
    raw = Writes(write)
    raw.padding = nn.Linear(8, 8 * 300)  # so many weights that few pixels are not worth their layout
    expected = CE(copy.deepcopy(raw)(x), y).item()
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False)
    if before == "a hook":
        handle = raw.body[0].register_forward_hook(lambda module, args, output: None)
        model(x)
        handle.remove()
    else:
        model(x[:1, :, :4, :4])
    assert step.plan["channels_last"].choice == "on"
    assert step(x, y)["loss"] == pytest.approx(expected, rel=1e-4)
    assert step.plan["channels_last"].choice == "off"


def test_a_model_whose_images_stay_small_is_looked_at_for_a_while_alone():
    raw = Writes(HARMLESS["flatten"])
    raw.padding = nn.Linear(800, 800)
    model, step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False)
    for _ in range(60):
        assert not step._live.recovery.proven or _ >= 50
        model.eval()(images(1)[0][0][:1])
    assert step._live.recovery.proven


def test_a_pre_hook_of_a_plain_model_sees_images_as_they_are():
    raw, seen = Keeps().eval(), []
    raw.body[3].register_forward_pre_hook(lambda module, args: seen.append(args[0].view(4, -1).shape))
    fast_eval(lambda model: model(images(1)[0][0]))(raw)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("dynamo_is_at_work")
def test_compiled_functions_of_a_model_are_compiled_once():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def spread(h):
        return torch.relu(h) * 2

    class Compiled(Keeps):
        def forward(self, x):
            return self.head(spread(self.body(x)).mean((2, 3)))

    raw = Compiled()
    step = optimize(raw, SGD(raw.parameters(), 0.1), CE, precision="fp32", device="cpu", cudnn_benchmark=False).step
    for x, y in images(3):
        step(x, y)
    assert step.plan["channels_last"].choice == "on"
    assert len(graphs) == 1
