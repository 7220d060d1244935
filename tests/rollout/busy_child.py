"""Stands in for an engine that answers two calls at length before it reads the next one."""

import sys
import time

import numpy as np

from moe_rl.types import Completion, sampled_by
from moe_rl.vllm import wire
from moe_rl.vllm.process import channel_to_parent

LONG = {f"{number:0200d}": number for number in range(10_000)}

channel = channel_to_parent(wire.CALLS)
assert isinstance(channel.receive(), wire.Start)
channel.send(wire.Ready("0"))
numbers = [channel.receive().number for _ in range(2)]
time.sleep(0.5)
for number in numbers:
    completion = Completion("key", (1,), (2,), np.zeros(1, np.float32), "stop", sampled_by(0, 1), None)
    channel.send(wire.RequestsEnded(number, [(0, completion)]))
for number in numbers:
    channel.send(wire.Answered(number, wire.Counted(LONG)))
last = channel.receive()
channel.send(wire.Answered(last.number, wire.Counted({"tokens": len(last.call.runs[0])})))
sys.exit(0 if isinstance(channel.receive(), wire.Close) else 1)
