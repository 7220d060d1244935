"""Stands in for a child that never answers a call, and writes a file when it is told to end."""

import os
import time
from pathlib import Path

from moe_rl.vllm import wire
from moe_rl.vllm.process import channel_to_parent

channel = channel_to_parent(wire.CALLS)
channel.receive()
channel.send(wire.Ready("0"))
channel.receive()
assert isinstance(channel.receive(), wire.Close)
time.sleep(0.5)
Path(os.environ["LEFT"]).write_text("in order")
