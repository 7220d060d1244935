"""The pretend CUDA device, and code for GPUs that needs no ranks on it."""

import pytest
import torch

from moe_rl.vllm.capture import NOT_REPORTED, Capture
from moe_rl.weights import digest
from tests.gpu import test_digest
from tests.support import pretend_cuda
from tests.support.pretend_cuda import CUDA, Graph, PretendFault


@pytest.fixture
def device():
    with pretend_cuda.installed() as device:
        yield device
        assert not device.faults


def test_it_leaves_torch_as_it_was(device):
    assert torch.cuda.is_available() and torch.ones(1, device="cuda").is_cuda
    assert isinstance(torch.tensor([1.0], device=CUDA) + 1, pretend_cuda.PretendTensor)


def test_host_and_device_do_not_mix(device):
    on_device, on_host = torch.arange(4.0, device=CUDA), torch.arange(4.0)
    assert (on_device + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]  # a single number is an argument of the kernel
    for mixed in (lambda: on_device + on_host, lambda: on_device.index_select(0, on_host.long())):
        with pytest.raises(PretendFault, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()


def test_gradients_flow_as_on_the_host():
    def gradient(leaf: torch.Tensor) -> torch.Tensor:
        leaf.requires_grad_()
        (leaf.clamp(min=0)[::2].double().exp().sum() * leaf.mean()).backward()
        return leaf.grad

    values = torch.linspace(-1, 1, 6)
    on_host = gradient(values.clone())
    with pretend_cuda.installed():
        assert torch.equal(gradient(values.to(CUDA)).cpu(), on_host) and on_host.abs().sum() > 0


def test_every_wait_of_the_host_is_counted_with_its_place(device):
    rows = torch.arange(6, device=CUDA)
    for wait in (
        lambda: rows.sum().item(), lambda: bool(rows[0] > 1), rows.tolist, rows.cpu, lambda: rows[rows > 2],
        lambda: rows.nonzero(), lambda: rows.repeat_interleave(rows), lambda: torch.ones(3).to(CUDA),
        lambda: torch.tensor([1, 2], device=CUDA), torch.cuda.synchronize, torch.cuda.Event().synchronize,
        lambda: torch.empty(6, dtype=torch.int64).copy_(rows, non_blocking=True),  # not pinned
    ):  # fmt: skip
        device.syncs.clear()
        wait()
        assert sum(device.syncs.values()) == 1 and "test_device.py" in next(iter(device.syncs))[2], device.syncs
    device.syncs.clear()
    pinned = torch.ones(6).pin_memory().to(CUDA, non_blocking=True)
    rows.to("cpu", non_blocking=True)
    pinned.mul_(rows).repeat_interleave(rows, output_size=15)
    assert not device.syncs


def test_a_copy_arrives_when_it_is_waited_for_and_poison_is_read_before(device):
    source = torch.arange(4, device=CUDA)
    target = source.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    assert (target != torch.arange(4)).all()
    assert [done.query() for _ in range(3)] == [False, False, True] and target.tolist() == [0, 1, 2, 3]


def test_a_captured_graph_follows_its_buffers_where_fewer_rows_are_real(device):
    """vLLM captures the forward of a padded batch once, and replays it over the same addresses."""
    capture = object.__new__(Capture)
    capture.buffer = torch.full((8, 2, 2), NOT_REPORTED, dtype=torch.int32, device=CUDA)
    capture._column = {3: 0, 5: 1}
    chosen = torch.zeros(8, 2, dtype=torch.int64, device=CUDA)
    with Graph() as graph:
        capture.capture(3, chosen)
        capture.capture(5, chosen + 1)
    for real in (3, 6):
        capture.clear(8)
        chosen[:real].copy_(torch.arange(2 * real).view(real, 2))
        graph.replay()
        assert capture.buffer[:real, 0].tolist() == torch.arange(2 * real).view(real, 2).tolist()
        assert capture.buffer[:real, 1].tolist() == (1 + torch.arange(2 * real).view(real, 2)).tolist()
    with pytest.raises(PretendFault, match="while a graph is captured"), Graph():
        chosen.sum().item()


@pytest.mark.parametrize("name", [name for name in vars(test_digest) if name.startswith("test_")])
def test_the_digests_of_a_gpu(device, name):
    digest._salts.cache_clear()
    getattr(test_digest, name)()
    digest._salts.cache_clear()


@pytest.mark.long  # torch's compiler takes 10 s
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_forward_captures(backend):
    """vLLM compiles the model's forward as one graph, for any number of rows."""
    capture = object.__new__(Capture)
    capture.buffer, capture._column = torch.full((16, 2, 2), NOT_REPORTED, dtype=torch.int32), {3: 0, 5: 1}

    def forward(chosen):
        for layer in (3, 5):
            capture.capture(layer, chosen + layer)
        return chosen.sum()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)
        for rows in (5, 9):
            chosen = torch.arange(2 * rows).view(rows, 2)
            compiled(chosen)
            assert torch.equal(capture.buffer[:rows, 0], (chosen + 3).int())
            assert torch.equal(capture.buffer[:rows, 1], (chosen + 5).int())
