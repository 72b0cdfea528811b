"""What a step remembers between its calls, and what it tells of that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop import _forms as forms
from hotloop import _state
from hotloop._forms import with_loss_fn
from hotloop._ledger import Ledger
from hotloop._means import Means
from hotloop._parts import Live, lives_within
from hotloop._plan import Plan
from hotloop._scaling import Scaling
from hotloop._update import first_not_finite
from hotloop._window import Window


class Progress:
    """The open window, the outcome of the updates, the means: counted, read late, saved and restored."""

    _scaling: Scaling  # made with the update, which knows the gradients

    def __init__(
        self,
        lives: Sequence[Live],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        plan: Plan,
        *,
        window: int,
        loss_fn: Any,
    ) -> None:
        self.plan = plan
        self._lives = tuple(lives)
        self._live = lives[0]
        self._optimizers = tuple(optimizers)
        self._schedulers = tuple(schedulers)
        self._models = [live.parts.model for live in lives]
        # The wrapped models that a model is made of are inside its step as well.
        self._inside = [*self._lives, *(live for model in self._models for live in lives_within(model))]
        self._ledger = Ledger(optimizers, schedulers, partial(first_not_finite, self._models))
        self._window = Window(
            window, with_loss_fn(self._models, loss_fn), optimizers, on_replaced=self._ledger.replaced_gradients
        )
        self._means = Means()

    def __repr__(self) -> str:
        names = (type(thing).__name__ for thing in (*self._models, *self._optimizers))
        return f"<hotloop step of {', '.join(names)}, accumulate={self._window.size}; print(step.plan) tells what it does>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a step cannot be pickled or copied: save step.state_dict(), and load it into the step of a new optimize"
        )

    @property
    def updates(self) -> int:
        """How many times the weights were changed. Waits for the device only where float16 may have skipped an update there."""
        self._ledger.settle()
        return self._ledger.updates

    @property
    def skipped(self) -> int:
        """How many updates were skipped, since a gradient overflowed in float16. Waits as `updates` does."""
        self._ledger.settle()
        return self._ledger.skipped

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The gradient scaler: the user's own if one was given; disabled unless the precision is float16."""
        return self._live.parts.scaler

    @property
    def scale(self) -> float:
        """The scale of float16 gradients, 1.0 in other precisions. Waits for the device."""
        return self.scaler.get_scale()

    def mean(self) -> dict[str, float]:
        """The mean of every metric since the last call, over the steps in which it was present, skipped ones left out.

        Every call counts alike, or by its `weight=` where that was given: `weight=len(x)` for the mean over samples. Summed on
        the device; waits for it with one read.
        """
        return {name: total / weight for name, (total, weight) in self._taken_sums().items() if weight}

    def _taken_sums(self) -> dict[str, list[Any]]:
        sums = self._means.sums()
        self._means = Means()
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the model and the optimizer, as plain data and tensors.

        Keys: `version`, `scaler` (GradScaler's own dict), `schedulers`, `updates`, `skipped`, `running_skips`, `window` (the
        open window with its gradients by parameter name), `mean` and `taken_back` (automatic choices). It loads with
        `torch.load(..., weights_only=True)`.
        Waits for the device.
        """
        if self._window.is_open:
            self._scaling.catch_up(self.scaler)  # what is saved fits the scale that is saved
        return _state.of(self._memory())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Everything is checked first: a state that does not fit raises and changes nothing."""
        memory = self._memory()
        _state.load(memory, state)
        if again := [name for name in state["taken_back"] if name in memory.may_take_back]:
            self._live.recovery.take_back(again, "in the run that is resumed")
        self._scaling.remember(self.scaler)

    def _check_own_loss(self, loss: Tensor, call: forms.Call) -> None:
        """Raise unless the loss can be trained with; warn where an eval-mode call has kept a model out of its graph."""
        forms.check_loss(loss, call, in_eval=not self._live.parts.model.training)
        for live in self._inside:
            if live.cut:
                live.cut = False
                if not live.parts.model.training and self._trains(live.parts.model):
                    self._ledger.cut_graph(forms.written(*call), type(live.parts.model).__name__)

    def _trains(self, model: nn.Module) -> bool:
        trained = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        return any(p.requires_grad and id(p) in trained for p in model.parameters())

    def _memory(self) -> _state.Memory:
        held = (self.scaler, self._window, self._ledger, self._means)
        recovery = self._live.recovery
        choices = self._live.taken_back, [] if recovery is None else recovery.names
        return _state.Memory(self._models, self._optimizers, self._schedulers, *held, *choices)
