"""Knowledge distillation: a large network, trained first, teaches a small one to read handwritten digits.

    python examples/distillation.py [--epochs 10]

Both are wrapped. The teacher is in eval mode, where a call keeps no graph: its outputs need no `no_grad` and no
`detach`.
"""

from __future__ import annotations

import argparse

import torch
from digits import make_data, make_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop import fast_eval, optimize, prefetch

TEMPERATURE = 3.0


def from_teacher(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    ours, theirs = (F.log_softmax(logits / TEMPERATURE, 1) for logits in (student_logits, teacher_logits))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * TEMPERATURE**2


@fast_eval
def judge(student: nn.Module, teacher: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> dict[str, float]:
    right = agreed = total = 0
    for x, y in loader:
        answer = student(x).argmax(1)
        right += (answer == y).sum()
        agreed += (answer == teacher(x).argmax(1)).sum()
        total += len(y)
    return {"accuracy": right / total, "agreement": agreed / total}


def main(epochs: int = 10) -> dict[str, float]:
    train, test = make_data()
    loader = DataLoader(train, batch_size=64, shuffle=True)

    teacher = make_model()
    teacher, teacher_step = optimize(teacher, torch.optim.Adam(teacher.parameters(), lr=2e-3), nn.CrossEntropyLoss())
    for _ in range(epochs):
        for x, y in prefetch(loader, teacher):
            teacher_step(x, y)
    teacher.eval()

    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    student, student_step = optimize(student, torch.optim.Adam(student.parameters(), lr=3e-3))
    for _ in range(epochs):
        for x, y in prefetch(loader, student):
            logits = student(x)
            soft, hard = from_teacher(logits, teacher(x)), F.cross_entropy(logits, y)
            student_step(0.7 * soft + 0.3 * hard, soft=soft, hard=hard)
        print(", ".join(f"{name} {value:.3f}" for name, value in student_step.mean().items()))

    result = judge(student, teacher, DataLoader(test, batch_size=64))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (student, teacher)]
    print(f"a student of {sizes[0]:,} parameters for a teacher of {sizes[1]:,}: {result}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
