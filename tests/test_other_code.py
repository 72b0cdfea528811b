"""Other people's code around a wrapped model and its step: torch's own tools, and the libraries of the field."""

from __future__ import annotations

import copy
import io
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim import optimizer as optimizer_hooks
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop import fast_eval
from parity.twins import differences, plain_loop, snapshot

# What is compared with runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu", exact=True)
CE = nn.CrossEntropyLoss()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(count)]


def sgd(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_same(change, count=6, between=lambda i, model: None, **options):
    """What a plain loop learns after `change(model)`, and with `between(i, model)` after each step, to the last bit."""
    plain, raw = net(), net()
    change(plain)
    optimizer = sgd(plain)
    for i, each in enumerate(batches(count)):
        plain_loop(plain, optimizer, CE, [each])
        between(i, plain)
    for wrap_first in (False, True):
        raw = net()
        if not wrap_first:
            change(raw)
            model, step = optimize(raw, its := sgd(raw), CE, **options)
        else:
            model = optimize(raw)
            change(model)
            model, step = optimize(raw, its := sgd(raw), CE, **options)
        for i, (x, y) in enumerate(batches(count)):
            step(x, y)
            between(i, model)
        assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []


# --- tools that change a model ------------------------------------------------------------------------------------------

CHANGES = {
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[3]),
    "orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "a parametrization": lambda m: parametrize.register_parametrization(m[0], "weight", nn.Tanh()),
    "prune": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5),
    "prune structured": lambda m: prune.ln_structured(m[3], "weight", amount=0.4, n=2, dim=0),
    "freeze": lambda m: m[0].requires_grad_(False),
    "another layer": lambda m: m.__setitem__(3, nn.Linear(8, 3, bias=False)) or nn.init.constant_(m[3].weight, 0.1),
    "tied": lambda m: setattr(m[3], "bias", m[3].bias),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_a_tool_has_changed(change):
    """E1, F-7b"""
    assert_same(CHANGES[change])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pruned_further_between_steps(accumulate):
    """The mask changes, and with it what is trained."""

    def between(i, model):
        if i == 2:
            prune.random_unstructured(model[0], "bias", amount=2)
            model[0].bias_mask.fill_(1)
            model[0].bias_mask[:2] = 0
        if i == 4:
            prune.remove(model[0], "weight")

    def loop(model, optimizer, train):
        prune.l1_unstructured(model[0], "weight", amount=0.3)
        for i, each in enumerate(batches(6)):
            train(each)
            if i % accumulate == accumulate - 1:
                between(i, model)

    plain, raw = net(), net()
    optimizer, its = sgd(plain), sgd(raw)
    held = []

    def train_plain(each):
        held.append(each)
        if len(held) == accumulate:
            plain_loop(plain, optimizer, CE, held, accumulate=accumulate)
            held.clear()

    loop(plain, optimizer, train_plain)
    model, step = optimize(raw, its, CE, accumulate=accumulate)
    loop(model, its, lambda each: step(*each))
    assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []


# --- averages -----------------------------------------------------------------------------------------------------------

AVERAGES = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "a function": {"avg_fn": lambda mean, value, count: 0.5 * mean + 0.5 * value},
}


@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_of_the_weights(average):
    """E4, E10: made and updated from the wrapped model, with statistics by `update_bn`, saved, loaded and evaluated."""
    loader = DataLoader(TensorDataset(torch.cat([x for x, _ in batches(6)])), batch_size=5)

    def train(model, update):
        averaged = AveragedModel(model, **AVERAGES[average])
        for each in batches(6):
            update(each)
            averaged.update_parameters(model)
        update_bn(loader, averaged)
        return averaged

    plain, raw = net(), net()
    optimizer = sgd(plain)
    expected = train(plain, lambda each: plain_loop(plain, optimizer, CE, [each]))
    model, step = optimize(raw, its := sgd(raw), CE)
    averaged = train(model, lambda each: step(*each))
    assert differences(snapshot(averaged, raw, its), snapshot(expected, plain, optimizer)) == []
    loaded = AveragedModel(net(), **AVERAGES[average])
    loaded.load_state_dict(averaged.state_dict())
    x = batches(1)[0][0]

    @fast_eval
    def predict(model):
        return model(x)

    assert torch.equal(predict(averaged), expected.eval()(x))
    assert torch.equal(predict(averaged), loaded.eval()(x))


# --- functional ---------------------------------------------------------------------------------------------------------


def test_functional_gradients_train_as_the_step_does():
    """F-7b: `torch.func.grad` of the wrapped model is the gradient that a step applies."""
    raw, twin = net(), net()
    for each in (raw, twin):
        each[1].eval()  # torch cannot change buffers inside of a transform
    model, step = optimize(raw, SGD(raw.parameters(), lr=0.5), CE)
    ((x, y),) = batches(1)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    called = optimize(twin)
    gradients = torch.func.grad(lambda p: CE(torch.func.functional_call(called, p, (x,)), y))(parameters)
    step(x, y)
    for name, p in raw.named_parameters():
        torch.testing.assert_close(p, parameters[name] - 0.5 * gradients[name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_inside_and_around(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

        def forward(self, x):
            return self.b(checkpoint(lambda x: self.drop(self.a(x)).tanh(), x, use_reentrant=reentrant))

    plain, raw = Checkpointed(), Checkpointed()
    data = [(x.requires_grad_(), y) for x, y in batches(4)]
    optimizer, its = sgd(plain), sgd(raw)
    torch.manual_seed(3)
    plain_loop(plain, optimizer, CE, data)
    expected = snapshot(plain, optimizer)
    model, step = optimize(raw, its, CE)
    torch.manual_seed(3)
    for i, (x, y) in enumerate(data):
        if i % 2:
            step(x, y)
        else:
            step(CE(checkpoint(model, x, use_reentrant=reentrant), y))
    assert differences(snapshot(raw, its), expected) == []


# --- hooks --------------------------------------------------------------------------------------------------------------

MODULE_HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]
TENSOR_HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]
OPTIMIZER_HOOKS = [
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "fp16"}], ids=str)
def test_hooks_of_every_kind_run_as_often_as_in_a_plain_loop(options):
    """F-6d: and in the same order; the step adds no call and leaves none out."""
    calls = []

    def note(kind, *_):
        calls.append(kind)

    def train(model, optimizer, train_one):
        owners = [(model, MODULE_HOOKS, "module"), (optimizer, OPTIMIZER_HOOKS, "optimizer")]
        owners += [(next(model.parameters()), TENSOR_HOOKS, "tensor")]
        handles = [getattr(o, name)(partial(note, f"{kind} {name}")) for o, names, kind in owners for name in names]
        handles += [optimizer_hooks.register_optimizer_step_pre_hook(partial(note, "global pre"))]
        handles += [optimizer_hooks.register_optimizer_step_post_hook(partial(note, "global post"))]
        handles += [nn.modules.module.register_module_forward_hook(partial(note, "global forward"))]
        try:
            for x, y in batches(4):
                train_one((x.requires_grad_(), y))
            for part in (model, optimizer):
                part.load_state_dict(part.state_dict())
        finally:
            for handle in handles:
                handle.remove()
        made = list(calls)
        calls.clear()
        return made

    accumulate, scaler = options.get("accumulate", 1), torch.amp.GradScaler("cpu", enabled=options.get("precision") == "fp16")
    plain, raw = net(), net()
    optimizer, its, count = sgd(plain), sgd(raw), [0]

    def by_hand(each):
        if count[0] % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            output = plain(each[0])
        scaler.scale(F.cross_entropy(output.float(), each[1]) / accumulate).backward()
        count[0] += 1
        if count[0] % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()

    expected = train(plain, optimizer, by_hand)
    model, step = optimize(raw, its, F.cross_entropy, **options)
    got = train(model, its, lambda each: step(*each))
    assert Counter(got) == Counter(expected)
    assert got == expected
    assert {name for kind in got for name in kind.split()[1:]} >= {*TENSOR_HOOKS, *OPTIMIZER_HOOKS, *MODULE_HOOKS}


def test_an_optimizer_in_the_backward():
    """A step per parameter, by a hook that drops the gradient: the step of the rest goes on without them."""
    torch.manual_seed(0)
    raw, plain = net(), net()

    def prepare(model):
        first = [*model[0].parameters()]
        own = {p: SGD([p], lr=0.1) for p in first}

        def update(p):
            own[p].step()
            own[p].zero_grad()

        for p in first:
            p.register_post_accumulate_grad_hook(update)
        return SGD([p for p in model.parameters() if all(p is not f for f in first)], lr=0.1)

    optimizer, its = prepare(plain), prepare(raw)
    plain_loop(plain, optimizer, CE, batches(5))
    step = optimize(raw, its, CE).step
    for x, y in batches(5):
        step(x, y)
    assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []


# --- schedulers ---------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=12),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, 3),
}


def test_the_table_has_every_scheduler_of_torch():
    named = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and hasattr(kind, "get_last_lr")}
    assert named - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys() - {"SWALR"} | {"ReduceLROnPlateau"}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_and_its_resumption(name, accumulate):
    """G8, G14, G15: bitwise the plain loop's, also saved in the middle and loaded into new objects."""
    plain = net()
    optimizer = sgd(plain)
    scheduler = SCHEDULERS[name](optimizer)
    plain_loop(plain, optimizer, CE, batches(10), scheduler=scheduler, accumulate=accumulate)

    raw = net()
    its = sgd(raw)
    own = SCHEDULERS[name](its)
    step = optimize(raw, its, CE, scheduler=own, accumulate=accumulate).step
    for i, (x, y) in enumerate(batches(10)):
        if i == 5:
            saved = io.BytesIO()
            torch.save([part.state_dict() for part in (raw, its, step)], saved)
            saved.seek(0)
            raw = net()
            its = sgd(raw)
            own = SCHEDULERS[name](its)
            step = optimize(raw, its, CE, scheduler=own, accumulate=accumulate).step
            for part, state in zip((raw, its, step), torch.load(saved, weights_only=name != "LambdaLR"), strict=True):
                part.load_state_dict(state)
        step(x, y)
    assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []
    assert own.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize(
    "feed", [lambda m: m["loss"], lambda m: m, float, lambda m: m.item()], ids=["index", "it", "float", "item"]
)
def test_reduce_on_plateau_fed_with_metrics(feed):
    """G11: after each epoch, with a number or with the metrics themselves."""
    raw = net()
    optimizer = SGD(raw.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.9)
    step = optimize(raw, optimizer, CE).step
    ((x, y),) = batches(1)
    for _ in range(4):
        scheduler.step(feed(step(x, y)))
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert type(scheduler.best) is float


def test_a_schedule_per_epoch_by_hand_and_a_rate_set_by_hand():
    plain, raw = net(), net()
    optimizer, its = sgd(plain), sgd(raw)
    theirs, own = lr_scheduler.StepLR(optimizer, 1, 0.5), lr_scheduler.StepLR(its, 1, 0.5)
    step = optimize(raw, its, CE).step
    for epoch in range(3):
        data = batches(3, seed=epoch)
        plain_loop(plain, optimizer, CE, data)
        for x, y in data:
            step(x, y)
        theirs.step()
        own.step()
        for o in (optimizer, its):
            o.param_groups[0]["momentum"] = 0.5 + epoch / 10
    assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []


# --- libraries of the field ---------------------------------------------------------------------------------------------


def test_a_progress_bar_of_tqdm():
    tqdm = pytest.importorskip("tqdm").tqdm
    step = optimize(model := net(), sgd(model), CE).step
    out = io.StringIO()
    with tqdm(batches(3), file=out, ascii=True) as bar:
        for x, y in bar:
            metrics = step(x, y)
            bar.set_postfix(metrics, refresh=False)
            bar.set_description(f"{metrics:.3f}")
    assert f"loss={metrics['loss']:.3g}" in out.getvalue()


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_summary_writer(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    model, step = optimize(raw := net(), sgd(raw), CE)
    with SummaryWriter(str(tmp_path)) as writer:
        for i, (x, y) in enumerate(batches(3)):
            metrics = step(x, y)
            writer.add_scalar("loss", metrics["loss"], i)
            writer.add_scalars("all", dict(metrics), i)
            writer.add_histogram("weight", model[0].weight, i)
        writer.add_graph(model.eval(), batches(1)[0][0])
    assert list(tmp_path.rglob("events*"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_metrics_and_scorers_of_scikit_learn(precision):
    """A26, A27: what an evaluation hands out can be given to NumPy."""
    metrics = pytest.importorskip("sklearn.metrics")
    base = pytest.importorskip("sklearn.base")
    torch.manual_seed(0)
    model, step = hotloop.optimize(raw := net(), AdamW(raw.parameters(), lr=0.05), CE, device="cpu", precision=precision)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    for _ in range(40):
        step(x, y)

    @fast_eval
    def evaluate(model):
        scores = model(x).double().softmax(1)
        return {
            "accuracy": metrics.accuracy_score(y, scores.argmax(1)),
            "auc": metrics.roc_auc_score(y, scores, multi_class="ovr"),
            "loss": metrics.log_loss(y, scores),
        }

    found = evaluate(model)
    assert found["accuracy"] > 0.9
    assert found["auc"] > 0.9

    class Estimator(base.ClassifierMixin, base.BaseEstimator):
        classes_ = [0, 1, 2]

        def fit(self, x, y):
            return self

        @fast_eval(model=model)
        def predict(self, x):
            return model(torch.as_tensor(x)).argmax(1).numpy()

    scorer = metrics.make_scorer(metrics.accuracy_score)
    assert scorer(Estimator(), x.numpy(), y.numpy()) == found["accuracy"]
    assert model.training


def test_metrics_of_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")
    model, step = optimize(raw := net(), sgd(raw), CE)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    mean = torchmetrics.MeanMetric()
    for x, y in batches(5):
        mean.update(step(x, y)["loss"])

    @fast_eval
    def evaluate(model, data):
        for x, y in data:
            accuracy.update(model(x), y)
        return accuracy.compute()

    value = evaluate(model, batches(5))
    assert type(value) is float
    assert value == sum((raw.eval()(x).argmax(1) == y).sum().item() for x, y in batches(5)) / 25
    assert float(mean.compute()) == pytest.approx(step.mean()["loss"])


def by_backward(model, optimizer, backward):
    for x, y in batches(4):
        optimizer.zero_grad()
        backward(CE(model(x), y))
        optimizer.step()


@pytest.mark.parametrize("placement", [True, False])
def test_accelerate_given_a_wrapped_model(placement):
    """F-8: `prepare` may hand back the plain module; either trains as it does without Accelerate, and the step goes on with it."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    plain, raw = net(), net()
    optimizer, its = sgd(plain), sgd(raw)
    model, step = optimize(raw, its, CE)
    prepared, prepared_optimizer = accelerator.prepare(model, its, device_placement=[placement, placement])
    assert accelerator.unwrap_model(prepared) in (raw, model)
    by_backward(prepared, prepared_optimizer, accelerator.backward)
    by_backward(plain, optimizer, lambda loss: loss.backward())
    for x, y in batches(3, seed=9):
        step(x, y)
    plain_loop(plain, optimizer, CE, batches(3, seed=9))
    assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []


def test_an_optimizer_that_accelerate_has_prepared():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    plain, raw = net(), net()
    optimizer = sgd(plain)
    prepared, its = accelerator.prepare(raw, sgd(raw))
    step = optimize(prepared, its, CE).step
    for x, y in batches(4):
        step(x, y)
    plain_loop(plain, optimizer, CE, batches(4))
    assert differences(snapshot(raw), snapshot(plain)) == []


def test_fabric_given_a_wrapped_model():
    """F-8"""
    fabric_ = pytest.importorskip("lightning_fabric")
    fabric = fabric_.Fabric(accelerator="cpu", devices=1)
    plain, raw = net(), net()
    optimizer, its = sgd(plain), sgd(raw)
    model, step = optimize(raw, its, CE)
    ready, ready_optimizer = fabric.setup(model, its)
    assert list(ready.state_dict()) == list(raw.state_dict())
    by_backward(ready, ready_optimizer, fabric.backward)
    by_backward(plain, optimizer, lambda loss: loss.backward())
    for x, y in batches(3, seed=9):
        step(x, y)
    plain_loop(plain, optimizer, CE, batches(3, seed=9))
    assert differences(snapshot(raw, its), snapshot(plain, optimizer)) == []


def test_copies_keep_the_link_between_a_model_and_its_optimizer():
    """E4, E5, F-3"""
    model, _ = optimize(raw := net(), its := sgd(raw), CE)
    copied, optimizer = copy.deepcopy((model, its))
    again, step = optimize(copied.__wrapped__, optimizer, CE)
    plain = net()
    theirs = sgd(plain)
    for x, y in batches(3):
        step(x, y)
    plain_loop(plain, theirs, CE, batches(3))
    assert differences(snapshot(again, optimizer), snapshot(plain, theirs)) == []
    assert differences(snapshot(raw), snapshot(net())) == []
