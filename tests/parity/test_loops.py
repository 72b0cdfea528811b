"""Loops of the kinds that people write, each once by hand and once with hotloop: bitwise the same.

A loop takes the number of its rounds and whether it is wrapped; it returns the states of what it works with, first the model
that it trains, and its log.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hotloop
from parity.twins import differences, snapshot

optimize = partial(hotloop.optimize, device="cpu", exact=True)


def gan(wrapped, rounds):
    """Two backwards, one update; the label tensor is refilled in place between them."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    opt_g, opt_c = (Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (generator, critic))
    parts, criterion, log = (generator, critic, opt_g, opt_c), nn.BCELoss(), []
    if wrapped:
        generator, step_g = optimize(generator, opt_g)
        critic, step_c = optimize(critic, opt_c)
    for _ in range(rounds):
        real, label = torch.randn(7, 6) * 0.3 + 0.5, torch.ones(7, 1)
        if wrapped:
            loss_real = criterion(critic(real), label)
            step_c.backward(loss_real)
            fake = generator(torch.randn(7, 4))
            label.fill_(0)
            on_fake = step_c(criterion(critic(fake.detach()), label))
            label.fill_(1)
            fooled = step_g(criterion(critic(fake), label))
        else:
            critic.zero_grad()
            loss_real = criterion(critic(real), label)
            loss_real.backward()
            fake = generator(torch.randn(7, 4))
            label.fill_(0)
            on_fake = criterion(critic(fake.detach()), label)
            on_fake.backward()
            opt_c.step()
            generator.zero_grad()
            label.fill_(1)
            fooled = criterion(critic(fake), label)
            fooled.backward()
            opt_g.step()
        log.append([loss_real.item(), on_fake.item(), fooled.item()])
    return snapshot(*parts), log


def wasserstein(wrapped, rounds):
    """A penalty on the gradient of the critic, by a double backward; several updates of the critic for one of the generator."""
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    opt_c, opt_g = (Adam(m.parameters(), lr=1e-3, betas=(0.0, 0.9)) for m in (critic, generator))
    parts, log = (critic, generator, opt_c, opt_g), []
    if wrapped:
        critic, step_c = optimize(critic, opt_c)
        generator, step_g = optimize(generator, opt_g)
    for number in range(rounds):
        real, fake = torch.randn(6, 4) + 1, generator(torch.randn(6, 3)).detach()
        between = torch.lerp(real, fake, torch.rand(6, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + penalty
        if wrapped:
            log.append(step_c(loss, penalty=penalty)["penalty"])
        else:
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()
            log.append(penalty.item())
        if number % 3 == 2:
            loss = -critic(generator(torch.randn(6, 3))).mean()
            if wrapped:
                step_g(loss)
            else:
                opt_g.zero_grad()
                loss.backward()
                opt_g.step()
    return snapshot(*parts), log


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, observation):
        raise AssertionError("only its method is called")

    def act(self, observation):
        hidden = self.body(observation).tanh()
        choice = Categorical(logits=self.policy(hidden))
        action = choice.sample()
        return action, choice.log_prob(action), self.value(hidden).squeeze(-1)


def policy_gradient(wrapped, rounds):
    """An episode row by row through a method of the model, then one loss over all of it."""
    actor = Actor()
    optimizer = Adam(actor.parameters(), lr=0.01)
    parts, log = (actor, optimizer), []
    if wrapped:
        actor, step = optimize(actor, optimizer, methods=("act",), clip_norm=0.5)
    for _ in range(rounds):
        observation, logs, values, rewards = torch.randn(4), [], [], []
        for _ in range(6):
            action, log_probability, value = actor.act(observation)
            logs.append(log_probability)
            values.append(value)
            rewards.append(float(action == 1) + observation[0].item())
            observation = torch.roll(observation, 1) * 0.9
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        values = torch.stack(values)
        policy_loss = -(torch.stack(logs) * (returns - values.detach())).sum()
        loss = policy_loss + F.smooth_l1_loss(values, returns, reduction="sum")
        if wrapped:
            metrics = step(loss, policy=policy_loss)
            norm = metrics["grad_norm"]
        else:
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(actor.parameters(), 0.5).item()
            optimizer.step()
        log.append([loss.item(), norm])
    return snapshot(*parts), log


class Detector(nn.Module):
    """Images of different sizes in a list, targets as a list of dicts, a dict of losses out; its BatchNorm is frozen."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.label, self.box = nn.Linear(4, 3), nn.Linear(4, 4)
        self.features[1].eval().requires_grad_(False)

    def forward(self, images, targets):
        pooled = torch.stack([self.features(image[None]).mean((0, 2, 3)) for image in images])
        return {
            "classifier": F.cross_entropy(self.label(pooled), torch.stack([t["label"] for t in targets])),
            "box": F.smooth_l1_loss(self.box(pooled), torch.stack([t["box"] for t in targets])),
        }


def detector(wrapped, rounds):
    """A dict of losses, with a look at them before the update."""
    model = Detector()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = LinearLR(optimizer, 0.001, total_iters=10)
    parts, log = (model, optimizer, scheduler), []
    if wrapped:
        model, step = optimize(model, optimizer, scheduler=scheduler)
    for _ in range(rounds):
        images = [torch.randn(1, 5 + i, 6) for i in range(3)]
        targets = [{"label": torch.randint(3, ()), "box": torch.rand(4)} for _ in images]
        losses = model(images, targets)
        if wrapped:
            metrics = dict(step(sum(losses.values()), **losses))
        else:
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            metrics = {"loss": loss.item(), **{name: value.item() for name, value in losses.items()}}
        log.append(metrics)
    return snapshot(*parts), log


def distillation(wrapped, rounds):
    """A teacher in eval mode, inside the loss."""
    teacher = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)).eval()
    student = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
    optimizer = Adam(student.parameters(), lr=0.01)
    parts, log = (student, teacher, optimizer), []

    def soft_loss(output, target):
        y, scores = target
        soft = F.kl_div(F.log_softmax(output / 4, 1), F.softmax(scores / 4, 1), reduction="batchmean")
        return 0.9 * 16 * soft + 0.1 * F.cross_entropy(output, y)

    if wrapped:
        teacher = optimize(teacher)
        student, step = optimize(student, optimizer, soft_loss)
    for _ in range(rounds):
        x, y = torch.randn(8, 5), torch.randint(3, (8,))
        if wrapped:
            loss = step(x, (y, teacher(x)))
        else:
            with torch.no_grad():
                scores = teacher(x)
            loss = soft_loss(student(x), (y, scores))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log.append(loss.item())
    return snapshot(*parts), log


def contrastive(wrapped, rounds):
    """Two views in one batch, the other samples as negatives, an accuracy of shape (1,) beside the loss."""
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=3)  # once per epoch: not the step's
    parts, log = (model, optimizer, scheduler), []
    if wrapped:
        model, step = optimize(model, optimizer)
    for number in range(rounds):
        x = torch.randn(5, 6)
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        z = F.normalize(model(views), dim=1)
        similar = (z @ z.T / 0.07).masked_fill(torch.eye(10, dtype=torch.bool), float("-inf"))
        partner = torch.arange(10).roll(5)
        loss = F.cross_entropy(similar, partner)
        top1 = (similar.argmax(1) == partner).float().mean(0, keepdim=True) * 100
        if wrapped:
            metrics = step(loss, top1=top1)
            log.append([metrics["loss"], metrics["top1"]])
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append([loss.item(), top1.item()])
        if number % 4 == 3:
            scheduler.step()
    return snapshot(*parts), log


class Diffusion(nn.Module):
    """Draws its own noise, and returns its own loss for a lone tensor."""

    def __init__(self):
        super().__init__()
        self.denoise = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 6))
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 20).cumprod(0))

    def forward(self, x):
        t = torch.randint(20, (len(x),))
        noise, kept = torch.randn_like(x), self.kept[t, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.denoise(torch.cat([noisy, t[:, None] / 20], 1)), noise)


def diffusion(wrapped, rounds):
    model = Diffusion()
    optimizer = Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
    parts, log = (model, optimizer), []
    if wrapped:
        model, step = optimize(model, optimizer, accumulate=2, clip_norm=1.0)
    for _ in range(rounds):
        for micro in range(2):
            x = torch.randn(4, 6)
            if wrapped:
                loss = step(x)
            else:
                loss = model(x)
                (loss / 2).backward()
                if micro:
                    clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            log.append(loss.item())
    return snapshot(*parts), log


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(2, 8)

    def forward(self, x):
        mu, log_variance = self.encode(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (log_variance / 2).exp()
        return self.decode(z).sigmoid(), mu, log_variance


def vae(wrapped, rounds):
    """The input is the target; the loss comes with its two terms."""
    model = Vae()
    optimizer = Adam(model.parameters(), lr=0.01)
    parts, log = (model, optimizer), []

    def elbo(output, x):
        image, mu, log_variance = output
        bce = F.binary_cross_entropy(image, x, reduction="sum")
        kl = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum()
        return bce + kl, {"bce": bce, "kl": kl}

    if wrapped:
        model, step = optimize(model, optimizer, elbo)
    for _ in range(rounds):
        x = torch.rand(6, 8)
        if wrapped:
            metrics = dict(step(x, x))
        else:
            optimizer.zero_grad()
            loss, terms = elbo(model(x), x)
            loss.backward()
            optimizer.step()
            metrics = {"loss": loss.item(), **{name: term.item() for name, term in terms.items()}}
        log.append(metrics)
    return snapshot(*parts), log


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, features, adjacency):
        hidden = torch.sparse.mm(adjacency, self.first(features)).relu()
        return F.log_softmax(torch.sparse.mm(adjacency, self.second(F.dropout(hidden, 0.5, self.training))), 1)


def graph(wrapped, rounds):
    """One sparse graph, all nodes in every step, a loss over the labelled ones; evaluated inline in eval mode."""
    nodes = torch.randint(12, (2, 40))
    adjacency = torch.sparse_coo_tensor(nodes, torch.rand(40), (12, 12), check_invariants=True).coalesce()
    features, labels, labelled = torch.randn(12, 5), torch.randint(3, (12,)), torch.arange(7)
    model = GraphNet()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    parts, log = (model, optimizer), []

    def loss_fn(output, target):
        return F.nll_loss(output[labelled], target[labelled])

    if wrapped:
        model, step = optimize(model, optimizer, loss_fn)
    for _ in range(rounds):
        model.train()
        if wrapped:
            loss = step(features, adjacency, labels)
        else:
            optimizer.zero_grad()
            loss = loss_fn(model(features, adjacency), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            log.append([loss.item(), model(features, adjacency).argmax(1).tolist()])
    return snapshot(*parts), log


class Series(nn.Module):
    """Makes its own state tensors, in float64."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = c = torch.zeros(len(x), 6, dtype=torch.float64)
        outputs = []
        for value in x.split(1, dim=1):
            h, c = self.cell(value, (h, c))
            outputs.append(self.out(h))
        return torch.cat(outputs, dim=1)


def series(wrapped, rounds):
    """L-BFGS over the whole series in float64."""
    model = Series().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    parts, loss_fn, log = (model, optimizer), nn.MSELoss(), []
    data = torch.sin(torch.arange(12, dtype=torch.float64) / 2 + torch.arange(4, dtype=torch.float64)[:, None])
    x, y = data[:, :-1], data[:, 1:]
    if wrapped:
        model, step = optimize(model, optimizer, loss_fn)
    for _ in range(min(rounds, 6)):
        if wrapped:
            loss = step(x, y)
        else:

            def closure():
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
        log.append(loss.item())
    return snapshot(*parts), log


def averaged(wrapped, rounds):
    """EMA of the weights once per update, accumulation, warm-up and then a cosine, clipping."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=10)
    scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[4])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    parts, loss_fn, log = (model, average, optimizer, scheduler), nn.CrossEntropyLoss(label_smoothing=0.1), []
    if wrapped:
        model, step = optimize(model, optimizer, loss_fn, accumulate=3, clip_norm=1.0, scheduler=scheduler)
    for _ in range(rounds):
        for micro in range(3):
            x, y = torch.randn(6, 6), torch.randint(3, (6,))
            if wrapped:
                metrics = step(x, y)
                loss, updated = metrics["loss"], metrics.updated
            else:
                loss = loss_fn(model(x), y)
                (loss / 3).backward()
                loss, updated = loss.item(), micro == 2
                if updated:
                    clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            if updated:
                average.update_parameters(model)
            log.append([loss, updated])
    return snapshot(*parts), log


def two_critics(wrapped, rounds):
    """SAC: one optimizer over two critics with target copies, an actor, and a temperature of its own."""
    first, second = (nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2))
    targets, actor = copy.deepcopy((first, second)), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    temperature = nn.Parameter(torch.zeros(1))
    opt_q = Adam([*first.parameters(), *second.parameters()], lr=1e-2)
    opt_a, opt_t = Adam(actor.parameters(), lr=3e-3), Adam([temperature], lr=1e-2)
    parts, log = (first, second, *targets, actor, opt_q, opt_a, opt_t), []
    if wrapped:
        (first, second), step_q = optimize([first, second], opt_q)
        actor, step_a = optimize(actor, opt_a)

    def act(state):
        mean, spread = actor(state).chunk(2, dim=-1)
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + noise * spread.clamp(-2, 1).exp())
        return action, -0.5 * noise**2 - spread - torch.log(1 - action**2 + 1e-6)

    for _ in range(rounds):
        state, action, reward, following = torch.randn(6, 4), torch.randn(6, 1), torch.randn(6, 1), torch.randn(6, 4)
        with torch.no_grad():
            next_action, log_p = act(following)
            pair = torch.cat([following, next_action], 1)
            value = torch.min(targets[0](pair), targets[1](pair)) - temperature.exp() * log_p
            goal = reward + 0.99 * value
        pair = torch.cat([state, action], 1)
        loss_q = F.mse_loss(first(pair), goal) + F.mse_loss(second(pair), goal)
        if wrapped:
            step_q(loss_q)
        else:
            opt_q.zero_grad()
            loss_q.backward()
            opt_q.step()
        action, log_p = act(state)
        pair = torch.cat([state, action], 1)
        loss_a = (temperature.exp().detach() * log_p - torch.min(first(pair), second(pair))).mean()
        if wrapped:
            step_a(loss_a)
        else:
            opt_a.zero_grad()
            loss_a.backward()
            opt_a.step()
        loss_t = (-temperature.exp() * (log_p.detach() - 1)).mean()
        opt_t.zero_grad()
        loss_t.backward()
        opt_t.step()
        for target, source in zip(targets, (first, second), strict=True):
            for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
                slow.data.copy_(0.05 * fast.data + 0.95 * slow.data)
        log.append([loss_q.item(), loss_a.item(), temperature.item()])
    return snapshot(*parts), log


@dataclass
class Output:
    loss: Any
    logits: Any


class Tagger(nn.Module):
    """Called with keywords; returns an object that holds its own loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(20, 6), nn.Dropout(0.1), nn.Linear(6, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.drop(self.embed(input_ids)) * attention_mask[..., None]
        logits = self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


def dict_batches(wrapped, rounds):
    """Keyword batches, two groups, a linear schedule, windows that an epoch's end cuts short and leaves divided in full."""
    model = Tagger()
    decayed = [p for name, p in model.named_parameters() if "bias" not in name]
    optimizer = AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": [model.head.bias], "weight_decay": 0.0}], lr=0.01)
    scheduler = LambdaLR(optimizer, lambda update: max(0.0, 1 - update / 40))
    parts, log = (model, optimizer, scheduler), []
    if wrapped:
        model, step = optimize(model, optimizer, accumulate=2, scheduler=scheduler)
    for _ in range(rounds):
        for i in range(3):
            batch = {
                "input_ids": torch.randint(20, (4, 5)),
                "attention_mask": (torch.arange(5) < torch.randint(1, 6, (4, 1))).long(),
                "labels": torch.randint(2, (4,)),
            }
            if wrapped:
                loss = step(batch)
            else:
                loss = model(**batch).loss
                (loss / 2).backward()
                if i % 2 or i == 2:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            log.append(loss.item())
        if wrapped:
            step.flush(rescale=False)
    return snapshot(*parts), log


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(10, 6), nn.LSTM(6, 6, 2, dropout=0.2), nn.Linear(6, 10)
        self.head.weight = self.embed.weight

    def forward(self, tokens, state):
        output, state = self.lstm(self.embed(tokens), state)
        return self.head(output), state


def language_model(wrapped, rounds):
    """Truncated backpropagation: the state is carried over and cut off; tied weights; a learning rate set by hand."""
    model = LanguageModel()
    optimizer = SGD(model.parameters(), lr=1.0)
    parts, log = (model, optimizer), []
    if wrapped:
        model, step = optimize(model, optimizer, clip_norm=0.25)
    state = (torch.zeros(2, 3, 6), torch.zeros(2, 3, 6))
    text = torch.randint(10, (rounds * 4 + 1, 3))
    for i in range(rounds):
        x, y = text[4 * i : 4 * i + 4], text[4 * i + 1 : 4 * i + 5]
        optimizer.param_groups[0]["lr"] = 1.0 / (1 + i)
        logits, state = model(x, tuple(s.detach() for s in state))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if wrapped:
            loss = step(loss)
        else:
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        log.append(loss.item())
    return snapshot(*parts), log


LOOPS = [
    gan, wasserstein, policy_gradient, detector, distillation, contrastive, diffusion, vae, graph, series, averaged, two_critics,
    dict_batches, language_model,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(loop):
    results = []
    for wrapped, rounds in ((False, 0), (False, 20), (True, 20)):
        torch.manual_seed(1)
        results.append(loop(wrapped, rounds))
    untrained, by_hand, wrapped = results
    assert differences(by_hand, wrapped) == []
    (model, *_), _ = by_hand
    assert differences(untrained[0][0], model), "the loop trains nothing"
