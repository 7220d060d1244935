import json
from pathlib import Path

from moe_rl import TraceStore
from moe_rl.rollout.server import VllmServer
from moe_rl.types import GenerateRequest

url = json.loads(Path("runs/server.json").read_text())["url"]
server, store = VllmServer(url, Path("runs/token")), TraceStore("runs/store")
asked = GenerateRequest(
    key="first", prompt_token_ids=(3, 4, 5, 6), seed=1, max_tokens=8, temperature=1.0, stop_token_ids=(1,)
)
for one in server.generate([asked], shard="mine"):
    print(one.token_ids, store.read(one.routes).routes.shape)  # tokens forwarded, layers with experts, top_k
