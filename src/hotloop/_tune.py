"""`tune=True`: what "auto" would guess is measured on the job. Every trial is a real training step."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotloop import _forms as forms
from hotloop._facts import Facts
from hotloop._median import median
from hotloop._metrics import Metrics
from hotloop._parts import Live
from hotloop._plan import Decision
from hotloop._recovery import Recovery
from hotloop._step import Step
from hotloop.transforms import TRIALS, placement

LEAST, MOST = 8, 24  # pairs of a plain and a changed step; as many more than LEAST as noise asks for
GAIN = 0.97  # what stays takes at most so much of the plain step's time
TOO_SLOW = 2.0  # a trial that takes so many times as long is dropped at once
TIME_BOX = 600.0  # seconds of tuning, after which what is not decided stays plain

Configuration = tuple[Decision, ...]
clock = time.perf_counter


def trials(facts: Facts, wishes: dict[str, Any]) -> dict[str, tuple[Decision, Any]]:
    """What may be tried, by the name of its wish: where that is "auto", with the wish that holds in its place."""
    if facts.world is not None and facts.world.size > 1:
        raise ValueError(
            "optimize(..., tune=True) in several processes: each would measure other times, and ranks would choose differently; tune "
            "in one process, and pass what step.plan shows then"
        )
    facts = replace(facts, device=placement.resolve(facts, wishes["device"])[0])
    if facts.exact:
        return {}
    found = {name: (trial(facts), plain) for name, trial, plain in TRIALS if wishes[name] == "auto"}
    return {name: (decision, plain) for name, (decision, plain) in found.items() if decision is not None}


class Tuner:
    """Stands in for the training part of a step until it has measured, then steps out of the way.

    A unit is a whole accumulation window. Each candidate alternates with the plain configuration, and the ratios of such pairs
    decide: a drifting machine slows both down. Units that raised, overflowed or were flushed are repeated.
    """

    def __init__(self, step: Step, lives: Sequence[Live], candidates: Sequence[tuple[Decision, Any]]) -> None:
        self._step, self._lives = step, lives
        self._candidates = [decision for decision, _ in candidates]
        self._plain = {d.name: Decision(d.name, plain or "off", "tune=True: being measured") for d, plain in candidates}
        self._written: dict[str, Decision] = {}
        for decision in self._plain.values():
            self._record(decision)
        self._configuration: Configuration = ()
        self._schedule = self._units()
        self._began = clock()
        self._started = self._ended = math.nan
        if candidates:
            next(self._schedule)
            step.tuning = True
            step._train = self._train  # type: ignore[method-assign]

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float) -> Metrics:
        step, window = self._step, self._step._window
        if window.count == 0:
            # Where the forward is the user's own, it lies before this call.
            before = window.extra or (len(args) == 1 and forms.is_loss(args[0]))
            self._started = self._ended if before else self._now()
        try:
            metrics = Step._train(step, args, kwargs, weight)
        except BaseException:
            self._started = math.nan
            raise
        if metrics.updated:
            ended = self._now()
            self._finish(math.nan if step.scaler.is_enabled() and metrics.skipped else ended - self._started)
        return metrics

    def _now(self) -> float:
        parts = self._lives[0].parts
        for device in parts.spread or (parts.device,):
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return clock()

    def _finish(self, seconds: float) -> None:
        """A unit is over: go on to the next, unless this one must be repeated."""
        if self._taken_back(self._configuration):
            seconds = math.inf
        if not math.isnan(seconds):
            try:
                self._set(self._schedule.send(seconds))
            except StopIteration:
                del self._step._train
                self._step.tuning = False
        self._ended = self._now()

    def _units(self) -> Generator[Configuration, float, None]:
        """The configuration of each unit, one after the other; is told how long it took."""
        measured: dict[str, float] = {}
        yield ()  # the first unit loads kernels and makes the optimizer's state
        for candidate in self._candidates:
            pairs = yield from self._pairs((), (candidate,))
            if self._taken_back((candidate,)):
                continue
            ratio = median(pairs)
            found = f"measured here: {ratio:.2f} x the plain step ({_counted(pairs)})"
            if _wins(pairs):
                measured[candidate.name] = ratio
                self._record(replace(candidate, why=f"{found}; {candidate.why}"))
            else:
                self._record(replace(self._plain[candidate.name], why=f"{candidate.choice} was {found}"))
        winners = tuple(c for c in self._candidates if c.name in measured)
        if len(winners) > 1:
            winners = yield from self._together(winners, measured)
        self._set(winners)

    def _together(self, winners: Configuration, measured: dict[str, float]) -> Generator[Configuration, float, Configuration]:
        """What each gains alone need not add up: together they must beat the best of them."""
        best = min(winners, key=lambda c: measured[c.name])
        pairs = yield from self._pairs((best,), winners)
        left = tuple(c for c in winners if not self._taken_back((c,)))
        ratio = median(pairs)
        if ratio < 1:
            return left
        for other in left:
            if other is not best:
                why = f"{other.choice} was {measured[other.name]:.2f} x the plain step, but {ratio:.2f} x that with {best.name}"
                self._record(replace(self._plain[other.name], why=f"{why} ({_counted(pairs)})"))
        return (best,)

    def _pairs(self, base: Configuration, changed: Configuration) -> Generator[Configuration, float, list[float]]:
        """The ratios of neighbouring units, until they tell."""
        ratios: list[float] = []
        yield changed  # as the very first unit
        while len(ratios) < MOST and not self._taken_back(changed):
            seconds = yield base
            ratios.append((yield changed) / seconds)
            if ratios[0] > TOO_SLOW or clock() - self._began > TIME_BOX:
                break
            if len(ratios) >= LEAST and (_certain(ratios) or median(ratios) >= 1):
                break
        return ratios or [math.inf]

    def _taken_back(self, configuration: Configuration) -> bool:
        """Whether a choice was one that user code cannot bear: the plan then holds another decision than ours."""
        return any(self._step.plan[c.name] is not self._written[c.name] for c in configuration)

    def _record(self, decision: Decision) -> None:
        self._written[decision.name] = decision
        self._step.plan.record(decision)

    def _set(self, configuration: Configuration) -> None:
        for live in self._lives:
            for decision in reversed(self._configuration):
                live.parts = decision.revert(live.parts)
            for decision in configuration:
                live.parts = decision.apply(live.parts)
                if decision.name == "precision":
                    live.parts = replace(live.parts, autocast=live.parts.autocast.as_automatic())
        borne = [(c, self._plain[c.name].choice) for c in configuration if c.name in ("precision", "channels_last")]
        recovery = Recovery(self._lives, borne) if borne else None
        for live in self._lives:
            live.recovery = recovery
        self._configuration = configuration


def _counted(pairs: list[float]) -> str:
    return "the first pair of steps" if len(pairs) == 1 else f"median of {len(pairs)} pairs of steps"


def _certain(ratios: list[float]) -> bool:
    """Whether chance alone would bring as many wins in less than one case of a hundred."""
    wins, count = sum(r < 1 for r in ratios), len(ratios)
    return 100 * sum(math.comb(count, k) for k in range(wins, count + 1)) < 1 << count


def _wins(ratios: list[float]) -> bool:
    return median(ratios) < GAIN and len(ratios) >= LEAST and _certain(ratios)
