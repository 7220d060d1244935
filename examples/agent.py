import json
from pathlib import Path

import httpx
from anthropic import Anthropic
from openai import OpenAI

served = json.loads(Path("runs/gateway.json").read_text())
owner = {"Authorization": f"Bearer {Path(served['token_file']).read_text().strip()}"}
opened = httpx.post(f"{served['url']}/sessions", headers=owner, json={"group": "task-17", "turns": 20}).json()

agent = OpenAI(base_url=opened["base_url"], api_key="not needed")
said = agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "What is 340+7?"}])
print(said.choices[0].message.content)
other = Anthropic(base_url=opened["url"], api_key="not needed")  # the same session through Anthropic's API
