"""Character language models, an LSTM and a small GPT, on the manual that ships with Python itself.

    python examples/language_model.py [--model gpt|lstm] [--updates 100]

The loop is the one that people write for such models: the model returns `(logits, loss)`, four micro-batches make an
update, gradients are clipped, the learning rate is set by hand, `estimate_loss()` takes no argument. Then the
training is killed in the middle of an update, resumed from its checkpoint, and ends with the very same weights.
"""

from __future__ import annotations

import argparse
import io
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotloop import fast_eval, optimize

BLOCK, BATCH, ACCUMULATE, WIDTH = 48, 8, 4, 64

text = "\n".join(topics[name] for name in sorted(topics))[:300_000]
characters = sorted(set(text))
codes = torch.tensor([characters.index(c) for c in text])
train_codes, test_codes = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]


def batch(i: int, codes: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Micro-batch number `i`: characters, and those that follow them."""
    starts = torch.randint(len(codes) - BLOCK, (BATCH,), generator=torch.Generator().manual_seed(i))
    rows = torch.stack([codes[s : s + BLOCK + 1] for s in starts.tolist()]).to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    return None if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(characters), WIDTH)
        self.lstm = nn.LSTM(WIDTH, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, len(characters))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.lstm(self.embed(x))[0])
        return logits, loss_of(logits, targets)


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(characters), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(characters))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(x) + self.place.weight[: x.shape[1]]
        logits = self.head(self.blocks(x))
        return logits, loss_of(logits, targets)


MODELS = {"lstm": LSTM, "gpt": GPT}


class Training:
    """A training that can be saved after any micro-batch, and begun again from there."""

    def __init__(self, kind: str, updates: int) -> None:
        torch.manual_seed(0)
        net = MODELS[kind]()
        self.updates, self.done = updates, 0
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
        self.model, self.train_step = optimize(net, self.optimizer, accumulate=ACCUMULATE, clip_norm=1.0)

    def run(self, until: int | None = None) -> None:
        """Train up to micro-batch `until`, or to the end."""
        for i in range(self.done, self.updates * ACCUMULATE if until is None else until):
            for group in self.optimizer.param_groups:  # by hand; a `scheduler=` would be moved by the step
                group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * (i // ACCUMULATE) / self.updates))
            x, y = batch(i, train_codes, self.model.device)
            _, loss = self.model(x, y)
            metrics = self.train_step(loss)
            if metrics.updated and self.train_step.updates % 20 == 0:
                means = self.train_step.mean()
                print(f"update {self.train_step.updates:3}  loss {means['loss']:.3f}  gradient norm {means['grad_norm']:.2f}")
            self.done = i + 1

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "step": self.train_step}
        torch.save({"done": self.done, **{name: part.state_dict() for name, part in parts.items()}}, file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        saved = torch.load(io.BytesIO(checkpoint))
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.train_step.load_state_dict(saved["step"])  # the gradients of the open window as well
        self.done = saved["done"]

    def bits_per_character(self) -> float:
        @fast_eval(model=self.model)
        def estimate_loss() -> float:
            losses = [self.model(*batch(-1 - i, test_codes, self.model.device))[1] for i in range(10)]
            return torch.stack(losses).mean()

        return estimate_loss() / math.log(2)


def main(model: str = "gpt", updates: int = 100) -> dict[str, float]:
    training = Training(model, updates)
    before = training.bits_per_character()
    middle = training.updates * ACCUMULATE // 2 + 1  # one micro-batch of a window of four
    training.run(until=middle)
    checkpoint = training.save()
    training.run()
    after = training.bits_per_character()

    resumed = Training(model, updates)
    resumed.load(checkpoint)
    resumed.run()
    weights = zip(training.model.parameters(), resumed.model.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in weights)

    print(f"{model}: {before:.2f} bits a character before, {after:.2f} after {updates} updates")
    print(f"resumed after {middle} micro-batches, in the middle of an update; the weights differ by {difference}")
    return {"before": before, "after": after, "difference": difference, "updates": resumed.train_step.updates}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--updates", type=int, default=100)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
