"""torch.compile, where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hotloop._facts import Facts
from hotloop._parts import Parts
from hotloop._plan import Decision


def decide(facts: Facts, wish: Any) -> Decision:
    """Off unless asked for. True compiles with torch's defaults: static shapes first, dynamic once shapes vary."""
    if wish is None or wish is False:
        return Decision("compile", "off", "not asked for: compiling costs seconds to minutes before the first step")
    if wish is not True and not (isinstance(wish, dict) and all(isinstance(key, str) for key in wish)):
        raise TypeError(
            f"optimize(..., compile={wish!r}): compile is True, False or a dict of torch.compile's arguments; write "
            "compile={'mode': 'reduce-overhead'}, for example"
        )
    options: dict[str, Any] = {} if wish is True else dict(wish)
    if options.get("disable"):
        return Decision("compile", "off", "asked for, with disable=True")

    def apply(parts: Parts) -> Parts:
        # Beside the module and not in its place: `state_dict` keys stay clean, and tracing, exporting and copying the plain
        # module go on working.
        return replace(parts, forward=_compiled(parts.model, options))

    def revert(parts: Parts) -> Parts:
        return replace(parts, forward=None)

    shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return Decision("compile", "on", f"asked for{': ' + shown if shown else ''}; changes rounding", apply, revert)


def _compiled(module: torch.nn.Module, options: dict[str, Any]) -> Any:
    try:
        return torch.compile(module, **options)
    except TypeError as error:
        raise TypeError(f"optimize(..., compile={options!r}): torch.compile does not take this ({error})") from None
    except RuntimeError as error:  # an unknown backend or mode
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"optimize(..., compile={options!r}): torch.compile refuses this: {reason}") from None
