"""The digest of the weights, computed by a GPU."""

import torch

from moe_rl.weights.digest import TensorDigests, tensor_digest, word_sum
from tests.weights.test_digest import some_tensors


def test_a_gpu_computes_the_sum_of_the_host():
    octets = torch.randint(0, 256, ((9 << 20) + 3,), dtype=torch.uint8)
    assert int(word_sum(octets.cuda())) == int(word_sum(octets))


def test_a_gpu_is_waited_for_once_for_all_digests():
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    tensor_digest("salts", torch.zeros(4).cuda())  # copies them to the device, once
    digests = TensorDigests()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, tensor in tensors.items():
            digests.add(name, tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert digests.read() == {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
