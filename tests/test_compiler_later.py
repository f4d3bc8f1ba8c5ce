"""Importing aiosync leaves torch's compiler alone, and what tensordict says to it is heard all the same."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest


@cache
def _prints(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_ALLOWED = """
import torch._dynamo
from torch._dynamo import trace_rules
from tensordict import utils
told = torch._C._functorch._add_batch_dim, torch._C._functorch._remove_batch_dim, torch._foreach_copy_
print("allowed:", *map(trace_rules.is_callable_allowed, told), len(trace_rules._allowed_callable_ids()))
print(utils._lock_warn._dynamo_marked_constant, utils._check_inbuild._dynamo_marked_constant)
"""

_COMPILED = """
import torch
from tensordict import TensorDict

@torch.compile(backend="eager", fullgraph=True)
def twice(td):
    return td.apply(lambda tensor: tensor * 2)

print(twice(TensorDict(a=torch.ones(3))).to_dict())
"""


@pytest.mark.parametrize("name", ["aiosync.sync", "aiosync.collectors.host", "aiosync.cli"])
def test_an_import_does_not_import_the_compiler(name: str) -> None:
    assert _prints(f"import sys, {name}; print('torch._dynamo' in sys.modules)") == "False\n"


def test_the_compiler_knows_what_it_would_have_known() -> None:
    plain = _prints(f"import tensordict.nn\n{_ALLOWED}")
    assert _prints(f"import aiosync\n{_ALLOWED}") == plain
    assert plain.startswith("allowed: True True True")


@pytest.mark.parametrize("first", ["torch._dynamo", "tensordict"])
def test_what_was_imported_before_makes_no_difference(first: str) -> None:
    plain = _prints(f"import tensordict.nn\n{_ALLOWED}")
    assert _prints(f"import {first}, aiosync\n{_ALLOWED}") == plain


def test_torch_is_as_it_was() -> None:
    same = (
        "import sys, torch.compiler as c; before = vars(c).copy(); import aiosync; print(before == vars(c))"
    )
    assert _prints(same) == "True\n"
    gone = "import sys, aiosync, torch._dynamo; print([f for f in sys.meta_path if 'aiosync' in repr(f)])"
    assert _prints(gone) == "[]\n"


_ASKED = """
import importlib.util, sys, aiosync
assert importlib.util.find_spec("torch._dynamo") is not None
"""

_FAILS_ONCE = """
import aiosync, sys
sys.modules["torch._dynamo.config"] = None
try:
    import torch._dynamo
except ImportError:
    del sys.modules["torch._dynamo.config"]
else:
    raise SystemExit("it did not fail")
"""


@pytest.mark.parametrize("before", [_ASKED, _FAILS_ONCE], ids=["only asked for", "failed once"])
def test_what_was_no_import_changes_nothing(before: str) -> None:
    plain = _prints(f"import tensordict.nn\n{_ALLOWED}")
    assert _prints(before + _ALLOWED) == plain


def test_what_uses_tensordict_compiles() -> None:
    assert _prints(f"import aiosync\n{_COMPILED}") == _prints(_COMPILED)
