"""Pictures made of real handwritten digits on a noisy ground, for the examples on segmentation and detection."""

from __future__ import annotations

import torch
from digits import make_data
from torch import Tensor

SIDE = 16  # of a digit, in pixels: twice its 8


def scene(digits: Tensor, height: int, width: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A picture (1, height, width), its mask (height, width) and the boxes (n, 4) of its digits, as x0, y0, x1, y1."""
    picture = 0.3 * torch.rand(1, height, width, generator=random)
    mask, boxes = torch.zeros(height, width), []
    columns = width // SIDE
    for cell in torch.randperm(columns * (height // SIDE), generator=random)[:2].tolist():
        top, left = cell // columns * SIDE, cell % columns * SIDE
        digit = digits[int(torch.randint(len(digits), (), generator=random))]
        digit = digit.repeat_interleave(2, -1).repeat_interleave(2, -2)
        picture[:, top : top + SIDE, left : left + SIDE] += 0.7 * digit
        mask[top : top + SIDE, left : left + SIDE] = (digit[0] > 0.4).float()
        boxes.append([left, top, left + SIDE, top + SIDE])
    return picture, mask, torch.tensor(boxes, dtype=torch.float32)


def train_and_test_digits() -> tuple[Tensor, Tensor]:
    train, test = make_data()
    return train.tensors[0], test.tensors[0]
