"""Taking an automatic choice back when the user's code cannot run under it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from traceback import clear_frames
from typing import Any, TypeVar

import torch

from hotloop._contents import Kept, replaced
from hotloop._detours import is_compiled
from hotloop._device import is_capturing
from hotloop._dynamo import run_eagerly
from hotloop._map_watch import MapWatch
from hotloop._parts import Live, backward_task
from hotloop._plan import Decision, revert
from hotloop._tensors import as_float32, is_16_bit, is_channels_last
from hotloop._traces import Proven, Snapshot

T = TypeVar("T")

# After these the device has no memory left, or takes no more work: a second run could only hide the first one's error.
_FINAL = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
# What torch and other code raise when they are given a dtype or a layout that they cannot work with. Exceptions of the user's own
# may end a forward early, on purpose, unless they speak of one.
_KINDS = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError, ArithmeticError)
_WORDS = ("float16", "BFloat16", "Half", "contiguous", "channels_last")
_PRECISION, _LAYOUT = "precision", "channels_last"
_LOOKS = 50  # calls of a mode, at most, until one has shown what it does to maps


class Recovery:
    """Runs calls under automatic choices that user code may not bear, and runs a failed one again without them.

    The first call that raises is repeated without one choice, then without all, from the same random state, and so that each
    buffer and each count that a module keeps is changed once. Where that works, the choice stays off for all models of the plan,
    which quotes the error; where it does not, the error was the user's own and is the one that the plain configuration gives.
    `proven` is what an earlier recovery of the same models has found out.
    """

    def __init__(
        self,
        lives: Sequence[Live],
        choices: list[tuple[Decision, str]],
        proven: Mapping[tuple[int, bool], Proven] | None = None,
    ) -> None:
        self._lives = lives
        self._choices = choices  # with what holds in its place
        self._running: set[int] = set()  # threads
        self._taking_back = threading.RLock()
        self._looks: dict[tuple[int, bool], int] = {}
        self.proven = dict(proven or {})  # by the place of a model and its mode, once that has run

    def copy(self, live: Live) -> Recovery:
        """For a copy of a model."""
        return Recovery([live], list(self._choices))

    def attempt(self, live: Live, run: Callable[[], T], given: Any = ()) -> T:
        """`run()`, which reads the live parts afresh each time; at most a few more times if it raises. It works on `given`."""
        # A call inside a step, or one that a backward makes again, is repeated with the whole step. A graph that is captured is
        # run by nobody yet, and may not ask for the random state.
        if self.is_attempting() or backward_task() != -1 or is_capturing():
            return run()
        choices = self._choices
        mode = self._mode(live)
        proven = self.proven.get(mode)
        saved = Snapshot(live, proven, given)
        thread = threading.get_ident()
        self._running.add(thread)
        try:
            if proven is not None:
                return run()
            with self._watch(live) as watch:
                result = run()
            self._looks[mode] = self._looks.get(mode, 0) + 1
            # A call whose images were too small to be laid out, or that a hook kept from it, tells nothing of those to come.
            if watch is None or watch.has_met_maps or self._looks[mode] == _LOOKS:
                self.proven[mode] = saved.proven()
            self._leave(saved.kept())
            return result
        except _FINAL:
            raise
        except Exception as error:
            if not _is_complaint(error):
                raise
            clear_frames(error.__traceback__)  # what the failed run has computed is in the way of the next one
            with self._taking_back:
                # Where another thread has taken one back meanwhile: first with what is left.
                tries: list[list[tuple[Decision, str]]] = [] if self._choices is choices else [[]]
                alone = [[choice] for choice in self._choices]
                tries += [*alone, self._choices] if len(alone) > 1 else alone
                return self._without(tries, run, saved, error)
        finally:
            self._running.discard(thread)

    def _without(
        self, tries: Sequence[list[tuple[Decision, str]]], run: Callable[[], T], saved: Snapshot, first: Exception
    ) -> T:
        error = first
        saved.failed()
        try:
            for dropped in tries:
                saved.restore()
                before = [live.parts for live in self._lives]
                for live in self._lives:
                    live.parts = revert([decision for decision, _ in dropped], live.parts)
                try:
                    result = run()
                except Exception as second:
                    error = second
                    for live, parts in zip(self._lives, before, strict=True):
                        for decision, _ in dropped:
                            decision.apply(parts)  # for what it changes in place
                        live.parts = parts
                    continue
                saved.finish()
                quoted = str(first).strip().split("\n")[0]
                self._settle(dropped, f"{type(first).__name__}: {quoted}")
                return result
            saved.finish()
            raise error.with_traceback(error.__traceback__) from None
        finally:
            del error, first  # their tracebacks hold this frame, and with it the batch and its graph

    @contextmanager
    def _watch(self, live: Live) -> Iterator[MapWatch | None]:
        """Looks on at a first run, for what goes wrong without a word."""
        if _LAYOUT not in self.names or live.parts.forward is not None or any(map(is_compiled, live.parts.model.modules())):
            yield None
            return
        # Dynamo would compile the onlooker into functions of the model's, and compile them once more without it.
        with run_eagerly(), MapWatch() as watch:
            yield watch

    def _leave(self, kept: list[Kept]) -> None:
        """Give the tensors that a model has kept, for code outside, the layout and the dtype that they have in the plain model."""
        maps = [(there, t) for there in kept for t in there.tensors if is_channels_last(t)]
        if maps and _LAYOUT in self.names:
            for _, tensor in maps:
                with torch.inference_mode(tensor.is_inference()):
                    tensor.data = tensor.data.contiguous()
            self.take_back([_LAYOUT], f"the model keeps feature maps ({maps[0][0].label}), which a loop may view")
        rounded = [there for there in kept if not there.was_16_bit and any(map(is_16_bit, there.tensors))]
        if rounded and _PRECISION in self.names:
            for there in rounded:
                there.holder[there.name] = replaced(there.holder[there.name], there.tensors, as_float32)
            self.take_back([_PRECISION], f"the model keeps 16-bit tensors ({rounded[0].label}), which a loop may work with")

    def has_proven(self, live: Live) -> bool:
        """Whether the model has run in its mode."""
        return self._mode(live) in self.proven

    def _mode(self, live: Live) -> tuple[int, bool]:
        return self._lives.index(live), live.parts.model.training

    def is_attempting(self) -> bool:
        """Whether this thread is inside a call that is repeated if it fails."""
        return threading.get_ident() in self._running

    @property
    def names(self) -> list[str]:
        """The choices that may still be taken back."""
        return [decision.name for decision, _ in self._choices]

    def take_back(self, names: Collection[str], why: str) -> None:
        """Take these back without a call that has failed."""
        with self._taking_back:
            dropped = [choice for choice in self._choices if choice[0].name in names]
            for live in self._lives:
                live.parts = revert([decision for decision, _ in dropped], live.parts)
            self._settle(dropped, why)

    def _settle(self, dropped: list[tuple[Decision, str]], reason: str) -> None:
        for decision, instead in dropped:
            why = f"the automatic {decision.choice} was taken back: {reason}"
            self._lives[0].plan.record(replace(decision, choice=instead, why=why))
        self._choices = [choice for choice in self._choices if choice not in dropped]
        for live in self._lives:
            live.taken_back += [decision.name for decision, _ in dropped]
            if not self._choices:
                live.recovery = None


def _is_complaint(error: Exception) -> bool:
    return isinstance(error, _KINDS) or any(word in str(error) for word in _WORDS)
