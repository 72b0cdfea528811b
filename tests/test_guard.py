"""The guard itself: each kind of leak fails the test that leaks, and only that one."""

from __future__ import annotations

from pathlib import Path

import pytest

LEAKS = {
    "torch.backends.cudnn.benchmark": "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn.deterministic": "torch.backends.cudnn.deterministic = True",
    "torch.backends.cudnn.enabled": "torch.backends.cudnn.enabled = False",
    "torch.backends.cudnn.allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "float32 matmul precision": "torch.set_float32_matmul_precision('medium')",
    "number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "grad mode": "torch.set_grad_enabled(False)",
    "inference mode": "kept.append(torch.inference_mode()); kept[-1].__enter__()",
    "anomaly mode": "torch.autograd.set_detect_anomaly(True, check_nan=True)",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default device": "torch.set_default_device('meta')",
    "autocast on cpu": "torch.set_autocast_enabled('cpu', True)",
    "autocast nesting": "torch.autocast('cpu', enabled=False).__enter__()",
    "autocast dtype on cuda": "torch.set_autocast_dtype('cuda', torch.bfloat16)",
    "autocast cache": "torch.set_autocast_cache_enabled(False)",
    "process group": "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
    "profile function": "sys.setprofile(lambda *_: None)",
    "dispatch modes": "TorchDispatchMode().__enter__()",
    "_global_forward_hooks": "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)",
    "_global_optimizer_post_hooks": "register_optimizer_step_post_hook(lambda *_: None)",
    "methods of Tensor": "torch.Tensor.item = lambda tensor: 0",
    "methods of Module": "torch.nn.Module.vanish = lambda module: None",
    "thread 'stray' still runs": "threading.Thread(target=stop.wait, args=(4,), name='stray', daemon=True).start()",
}


def test_a_leak_fails_its_test_and_not_the_next(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: what the guard could not put back must not reach other tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeconftest("from guard import leaves_no_trace")
    pytester.makepyfile(f"""
        import sys, threading, torch
        import pytest
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils._python_dispatch import TorchDispatchMode
        kept, stop = [], threading.Event()

        @pytest.mark.parametrize("code", {list(LEAKS.values())!r})
        def test_leaks(code):
            exec(code)

        def test_next():
            stop.set()
            assert torch.ones(2, requires_grad=True).sum().item() == 2
    """)
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-p", "no:cacheprovider", "-rN")
    result.assert_outcomes(passed=len(LEAKS) + 1, errors=len(LEAKS))
    blocks = result.stdout.str().split("the test left the process changed:")[1:]
    told = [[line for line in block.splitlines()[1:3] if line.startswith("  ")] for block in blocks]
    # Each fails for its own leak alone: what the one before it left has been put back.
    wrong = [(name, lines) for name, lines in zip(LEAKS, told, strict=True) if len(lines) != 1 or name not in lines[0]]
    assert wrong == []


def test_every_test_starts_from_the_same_seed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from guard import leaves_no_trace")
    pytester.makepyfile("""
        import pytest, torch
        seen = []

        @pytest.mark.parametrize("n", [1, 2])
        def test_draw(n):
            seen.append(torch.rand(n)[0].item())
            assert seen[0] == seen[-1]
    """)
    pytester.runpytest_inprocess("-p", "no:asyncio", "-p", "no:cacheprovider").assert_outcomes(passed=2)
