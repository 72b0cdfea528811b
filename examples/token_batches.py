"""Batches of tokens in dictionaries, and a model that returns its own loss, in the style of the large language model libraries.

    python examples/token_batches.py [--epochs 4]

Paragraphs of Python's manual are told apart by the chapter that they come from. `step(batch)` is `model(**batch)`.
Two micro-batches make an update; they differ in size, and `weight=` makes the update the mean over samples and not
over micro-batches.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop import fast_eval, optimize, prefetch

CHAPTERS = ["specialnames", "compound", "types", "formatstrings", "string-methods"]
Example = tuple[list[str], int]


def make_examples() -> tuple[list[Example], list[Example]]:
    examples = []
    for label, chapter in enumerate(CHAPTERS):
        for paragraph in topics[chapter].split("\n\n"):
            words = re.findall(r"[a-z_]+", paragraph.lower())
            if len(words) >= 8:
                examples.append((words, label))
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    cut = len(examples) * 4 // 5
    return [examples[i] for i in order[:cut]], [examples[i] for i in order[cut:]]


class Tokenizer:
    """Numbers for words, and batches of them, padded to the longest."""

    def __init__(self, examples: list[Example]) -> None:
        words = sorted({word for text, _ in examples for word in text})
        self.ids = {word: i for i, word in enumerate(words, start=2)}  # 0 pads, 1 is any unknown word

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        rows = [torch.tensor([self.ids.get(word, 1) for word in text]) for text, _ in examples]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([label for _, label in examples])}


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Classifier(nn.Module):
    def __init__(self, words: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.score = nn.Linear(width, 1)
        self.head = nn.Linear(width, len(CHAPTERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embed(input_ids)
        scores = self.score(hidden).squeeze(2).masked_fill(attention_mask == 0, float("-inf"))
        logits = self.head((scores.softmax(1)[..., None] * hidden).sum(1))
        return Output(logits, None if labels is None else F.cross_entropy(logits.float(), labels))


@fast_eval
def accuracy(model: nn.Module, loader: DataLoader[dict[str, Tensor]]) -> float:
    hits = total = 0
    for batch in loader:
        hits += (model(**batch).logits.argmax(1) == batch["labels"]).sum()
        total += len(batch["labels"])
    return hits / total


def main(epochs: int = 4) -> dict[str, float]:
    torch.manual_seed(0)
    train, test = make_examples()
    tokenizer = Tokenizer(train)
    loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=tokenizer)
    test_loader = DataLoader(test, batch_size=64, collate_fn=tokenizer)

    model = Classifier(words=len(tokenizer.ids) + 2)
    model, train_step = optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), accumulate=2)  # no loss_fn

    for _ in range(epochs):
        for batch in prefetch(loader, model):
            train_step(batch, weight=len(batch["labels"]))
        train_step.flush()  # an odd number of micro-batches leaves the last window half full
        print(f"loss {train_step.mean()['loss']:.3f}, accuracy on paragraphs not seen {accuracy(model, test_loader):.1%}")
    share = accuracy(model, test_loader)
    common = max(sum(label == chapter for _, label in test) for chapter in range(len(CHAPTERS))) / len(test)
    print(f"{share:.1%} right; always to name the longest chapter would be right for {common:.1%}")
    return {"accuracy": share, "by_guessing": common}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
