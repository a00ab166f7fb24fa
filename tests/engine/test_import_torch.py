"""An engine imports torch without what it does not use; whatever asks for it gets torch's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagoda_server.engine.runners import import_torch
from tests.servers import ROOT

IMPORT = """
from pagoda_server.engine.runners import import_torch as of_engine
of_engine.import_torch()
import sys, torch
"""

pytestmark = pytest.mark.skipif(import_torch.NVIDIA_DRIVER.exists(), reason="all of torch is imported where a GPU is")


def output(source: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT + source], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_all_modules_wait_and_none_is_loaded_by_what_an_engine_calls() -> None:
    source = """
from torch.nn import functional
torch.device("cpu")
x = torch.ones(2, 4, dtype=torch.bfloat16)
functional.scaled_dot_product_attention(x[None], x[None], x[None]), functional.silu(x), functional.rms_norm(x, (4,))
torch.from_numpy(x.float().numpy()).topk(2), torch.stack([x, x]).sum(), torch.inference_mode()(print)()
print(*of_engine.waiting_modules())
"""
    missing = set(import_torch.WAITING) - set(output(IMPORT + source).split())
    assert missing <= {"torch._native"}  # which torch 2.11 does not have


@pytest.mark.parametrize(
    "use",
    [
        "torch.vmap(lambda x: x + 1)(torch.zeros(3))[0].item() == 1",
        "torch.cond(torch.tensor(True), lambda: torch.ones(1), lambda: torch.zeros(1)).item() == 1",
        "torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(3))[0].item() == 1",
        "torch.fx.symbolic_trace(torch.nn.ReLU()).graph is not None",
        "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step() is None",
        "torch.export.export(torch.nn.ReLU(), (torch.zeros(1),)).graph is not None",
        "torch.distributions.Normal(0.0, 1.0).sample().shape == ()",
        "__import__('torch.utils.data.distributed').utils.data.DataLoader is not None",
        "torch.empty(torch.fx.experimental.sym_node.DynamicInt(3)).shape == torch.empty(3).shape",
        "str(torch.zeros(1)) == 'tensor([0.])'",
        "__import__('torch._subclasses.fake_tensor')._subclasses.fake_tensor.__spec__.loader.name.endswith('fake_tensor')",
        "torch.lobpcg(torch.eye(9), k=1)[0].shape == (1,)",
    ],
)
def test_the_first_use_of_any_loads_all_as_torch_has_them(use: str) -> None:
    source = f"""
torch.device("cpu")
assert {use}
assert not of_engine.waiting_modules()
assert type(torch.func) is type(sys) and torch.func.vmap is torch._functorch.apis.vmap
"""
    output(IMPORT + source)


def test_loaded_modules_have_the_names_that_a_plain_import_gives_them() -> None:
    names = f"{{name: dir(sys.modules[name]) for name in {list(import_torch.WAITING)} if name in sys.modules}}"
    plain = eval(output(f"import sys, torch; print({names})"))
    late = eval(output(IMPORT + f"torch.fx.Graph; print({names})"))
    missing = {name: set(wanted) - set(late[name]) for name, wanted in plain.items()}
    assert not any(missing.values()), missing
